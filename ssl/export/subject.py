"""What is exported: a trained backbone with all that a reader of its weights has to know."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.data.channels import backbone_options, normalisation
from nestling.ssl.run.loading import find_checkpoint, load_backbone, saved_step


@dataclass(frozen=True)
class Subject:
    """A backbone in evaluation mode, where it comes from, and the images that it was trained on.

    `options` are those given besides the name's own. Images are resized to a short side of
    `side / crop_ratio` pixels, cropped to `side`, and normalised in [0, 1] by `mean` and `std`.
    `checkpoint` is the name of its folder, without the path.
    """

    backbone: Backbone
    options: dict[str, Any]
    mean: list[float]
    std: list[float]
    side: int
    crop_ratio: float = 0.875
    network: str | None = None
    step: int | None = None
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        """The name that builds the backbone, with `options`."""
        return self.backbone.name

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of nestling's own families, not an adapter of a foreign network."""
        return self.name in backbones.names()

    def facts(self) -> dict[str, Any]:
        """What the weights' file says of itself; no path, as it may be handed on."""
        return {
            "backbone": {"name": self.name, "options": self.options},
            "network": self.network,
            "step": self.step,
            "mean": self.mean,
            "std": self.std,
            "side": self.side,
            "crop_ratio": self.crop_ratio,
        }


def load_subject(path: str | Path, network: str) -> Subject:
    """The teacher's or student's backbone of a run directory or checkpoint folder.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(path)
    backbone, config = load_backbone(checkpoint, network)
    return Subject(
        backbone.float().requires_grad_(False),
        backbone_options(config),
        *normalisation(config.data),
        config.knn.size or max(config.views.global_size),
        config.knn.crop_ratio,
        network,
        saved_step(checkpoint),
        checkpoint.resolve().name,
    )
