"""timm's layout: a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nestling.backbones.swin import Swin
from nestling.backbones.vit import ViT
from nestling.backbones.weights.timm import to_timm
from nestling.ssl.errors import UserError
from nestling.ssl.export.own import tensors
from nestling.ssl.export.sizes import Size, table_side, two_sizes
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target
from nestling.ssl.run.directory import write_json

BUILT_FOR = 224  # pixels: timm's Swin decides when it is built which stages shift their windows


class Timm(Target):
    """config.json names the architecture and its arguments, model.safetensors holds timm's keys."""

    name = "timm"
    loader = "timm"
    packages = ("timm",)

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        """A folder as timm's `local-dir:` takes it.

        Raises:
            UserError: timm has no network that computes the same.
        """
        try:
            model = to_timm(subject.backbone)
        except ValueError as error:
            raise UserError(f"--to timm: {error}") from error
        input_size = [len(subject.mean), *self.sizes(subject)[0]]
        config = {
            "architecture": model.name,
            "num_classes": 0,
            "num_features": subject.backbone.embed_dim,
            "model_args": {"num_classes": 0, **model.arguments},
            "pretrained_cfg": {
                "input_size": input_size,
                "interpolation": "bicubic",
                "crop_pct": subject.crop_ratio,
                "crop_mode": "center",
                "mean": subject.mean,
                "std": subject.std,
                "num_classes": 0,
                "custom_load": False,
            },
        }
        write_json(folder / "config.json", config)
        save_file(tensors(model.tensors), folder / "model.safetensors", {"format": "pt"})
        return {"architecture": model.name, "model_args": config["model_args"]}

    def read(self, subject: Subject, folder: Path) -> Network:
        import timm

        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        return as_network(model.eval().requires_grad_(False))

    def sizes(self, subject: Subject) -> list[Size]:
        backbone = subject.backbone
        if isinstance(backbone, ViT) and (side := table_side(backbone)):
            exact = backbone.antialias and not backbone.offset  # timm's way to resize the table
            return two_sizes(backbone, side) if exact else [(side, side)]
        if isinstance(backbone, Swin):
            return [(BUILT_FOR, BUILT_FOR)]
        return two_sizes(backbone, subject.side)


def as_network(model: Any) -> Network:
    """A timm model's normalised tokens; Swin's are an image with channels last and no class token."""

    def network(images: Tensor) -> tuple[Tensor, Tensor]:
        x = model.forward_features(images)
        if x.ndim == 4:
            patches = x.flatten(1, 2)
            return patches.mean(dim=1), patches
        return x[:, 0], x[:, model.num_prefix_tokens :]

    return network
