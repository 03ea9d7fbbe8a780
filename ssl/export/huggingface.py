"""Hugging Face's layout: a folder that `transformers.AutoModel.from_pretrained(FOLDER)` loads."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nestling.backbones.swin import Swin
from nestling.backbones.vit import ViT
from nestling.backbones.weights.huggingface import to_huggingface
from nestling.ssl.errors import UserError
from nestling.ssl.export.own import tensors
from nestling.ssl.export.sizes import Size, table_side, two_sizes, whole_windows
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target
from nestling.ssl.run.directory import installed, write_json

BICUBIC = 3  # PIL's number of it


class HuggingFace(Target):
    """config.json, model.safetensors, and preprocessor_config.json for `AutoImageProcessor`.

    Written without transformers.
    """

    name = "hf"
    loader = "transformers"
    packages = ("transformers",)

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        """Config, preprocessing and weights under the names of transformers.

        Raises:
            UserError: transformers has no network that computes the same.
        """
        try:
            model = to_huggingface(subject.backbone)
        except ValueError as error:
            raise UserError(f"--to hf: {error}") from error
        config, found = with_pooling(model.config, model.tensors)
        write_json(folder / "config.json", config)
        write_json(folder / "preprocessor_config.json", preprocessing(subject))
        save_file(tensors(found), folder / "model.safetensors", {"format": "pt"})
        return {"model_type": config["model_type"]}

    def read(self, subject: Subject, folder: Path) -> Network:
        model, report = quietly_loaded(folder)
        wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
        if wrong:
            raise UserError(f"transformers {installed('transformers')} doesn't match all keys: {wrong}")
        return as_network(model.requires_grad_(False))

    def sizes(self, subject: Subject) -> list[Size]:
        """Two where transformers computes the same at any size, else the one where it does."""
        backbone = subject.backbone
        if isinstance(backbone, ViT) and (side := table_side(backbone)):
            # How transformers resizes the table: antialiased in Dinov2WithRegistersModel alone.
            antialias = backbone.register_tokens is not None
            exact = backbone.antialias == antialias and not backbone.offset
            return two_sizes(backbone, side) if exact else [(side, side)]
        if isinstance(backbone, Swin):
            side = whole_windows(backbone, subject.side)
            return [(side, side)]  # one, as transformers' Swin changes with every size that it sees
        return two_sizes(backbone, subject.side)


def with_pooling(
    config: dict[str, Any], found: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A ViT's config and tensors with the pooling layer that `AutoModel` gives it and training has not.

    As the identity it makes `pooler_output` the class token, as Dinov2Model's is.
    """
    if config["model_type"] != "vit":
        return config, found
    dim = config["hidden_size"]
    layer = {"pooler.dense.weight": torch.eye(dim), "pooler.dense.bias": torch.zeros(dim)}
    return {**config, "pooler_act": "linear", "pooler_output_size": dim}, {**found, **layer}


def preprocessing(subject: Subject) -> dict[str, Any]:
    """What nestling's evaluation does to an image, in the words of transformers."""
    side = subject.side
    return {
        "image_processor_type": "BitImageProcessor",  # resizes the short side, then crops
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": max(side, round(side / subject.crop_ratio))},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": subject.mean,
        "image_std": subject.std,
    }


def quietly_loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode and the loading report, without a progress bar."""
    import transformers
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModel.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval(), report


def as_network(model: Any) -> Network:
    """A transformers model's normalised tokens; Swin has no class token, and pools."""
    settings = {"interpolate_pos_encoding": True} if model.config.model_type == "vit" else {}
    prefix = 1 + getattr(model.config, "num_register_tokens", 0)

    def network(images: Tensor) -> tuple[Tensor, Tensor]:
        out = model(pixel_values=images, **settings)
        if model.config.model_type == "swin":
            return out.pooler_output, out.last_hidden_state
        return out.last_hidden_state[:, 0], out.last_hidden_state[:, prefix:]

    return network
