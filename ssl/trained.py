"""From a path to a trained backbone, with all that using it takes: how its images are read and judged."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nestling.backbones import Backbone
from nestling.backbones.weights import Weights, built, read
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.data.channels import BY_MODE, backbone_options
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run.loading import find_checkpoint, load_backbone, saved_step

MODEL = "model.safetensors"
ANYWHERE = ""  # the images of a weights file: whoever judges it must name some


@dataclass(frozen=True)
class Trained:
    """A backbone in evaluation mode, float32, without gradients, and where it comes from.

    `config` is the run's; of a weights file it holds what the file says, else ImageNet's defaults, and its
    `data.train` is empty. `checkpoint` is a folder of a run, None for a file; `file` are the weights.
    """

    backbone: Backbone
    config: Config
    file: Path
    checkpoint: Path | None
    network: str | None
    step: int | None

    @property
    def size(self) -> int:
        """The side of the images that it is judged on."""
        return self.config.knn.size or max(self.config.views.global_size)

    @property
    def title(self) -> str:
        """Whose backbone, from where."""
        return f"{self.network or 'backbone'} of {printable(self.checkpoint or self.file)}"

    def refuse_nowhere(self) -> None:
        """Raise UserError where its config names no images and nobody gave any."""
        if self.config.data.train == ANYWHERE:
            raise UserError(
                f"checkpoint={printable(self.file)} is a weights file, which names no images: give "
                "data.train, as in data.train=/images"
            )

    def facts(self) -> dict[str, Any]:
        """What identifies it: of a file its hash, so that a result says which weights it belongs to."""
        return {
            "weights": str(self.file.resolve()),
            "sha256": weights_sha256(self.file),
            "network": self.network,
            "step": self.step,
            "backbone": self.config.backbone.name,
            "options": backbone_options(self.config),
        }


def load_trained(path: str | Path, network: str = "teacher") -> Trained:
    """The backbone of a run directory, of one of its checkpoints, or of a weights file in any known layout.

    A run directory stands for its best checkpoint, else its newest, the folder of a fine-tuning or an export
    for its network.

    Raises:
        UserError: nothing is there, it is damaged, or it is in no layout that is known.
    """
    path = Path(path).expanduser()
    is_foreign = (path / "config.json").is_file()  # Hugging Face's
    if (path / MODEL).is_file() and not is_foreign:  # a folder that a fine-tuning or an export left
        path /= MODEL
    if path.is_dir() and not is_foreign:
        checkpoint = find_checkpoint(path)
        backbone, config = load_backbone(checkpoint, network)
        file = checkpoint / f"{network}.safetensors"
        found = Trained(backbone, config, file, checkpoint, network, saved_step(checkpoint))
    else:
        try:
            weights = read(path, network)
            backbone = built(weights, path).backbone
        except ValueError as error:
            raise UserError(str(error)) from None
        found = Trained(backbone, _config_of(weights, path), path, None, weights.network, None)
    found.backbone.float().eval().requires_grad_(False)
    return found


def _config_of(weights: Weights, file: Path) -> Config:
    """How the images of a weights file are read: as an export of ours says, else as ImageNet's were."""
    count = int(weights.options.get("in_chans", 3))
    mode = {number: mode for mode, number in BY_MODE.items()}.get(count, "unchanged")
    said = _said_by(file)
    options = {key: value for key, value in weights.options.items() if key != "in_chans"}
    return Config(
        terms={},
        data=schema.Data(
            train=ANYWHERE,
            mode=mode,
            in_chans=None if mode in BY_MODE else count,
            mean=said.get("mean"),
            std=said.get("std"),
        ),
        backbone=schema.Backbone(weights.name, 0.0, options),
        knn=schema.Knn(size=int(said.get("side", 224)), crop_ratio=float(said.get("crop_ratio", 0.875))),
    )


def _said_by(file: Path) -> dict[str, Any]:
    """The facts in the metadata of an export of ours; {} for other files."""
    try:
        with safe_open(file, "pt") as content:
            facts: dict[str, Any] = json.loads((content.metadata() or {})["nestling"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return {}
    return facts


def file_sha256(file: Path) -> str | None:
    """The SHA-256 of a file; None for a folder, of which see `weights_sha256`."""
    if not file.is_file():
        return None
    with file.open("rb") as content:
        digest = hashlib.sha256()
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weights_sha256(file: Path) -> str:
    """Of a file; of a folder, as Hugging Face's are, of its files one after the other."""
    found = file_sha256(file)
    if found is not None:
        return found
    digest = hashlib.sha256()
    for part in sorted(path for path in file.iterdir() if path.is_file()):
        digest.update(f"{part.name} {file_sha256(part)}\n".encode())
    return digest.hexdigest()
