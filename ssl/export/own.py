"""nestling's own layout: the plain state dict of a backbone, which says itself how to build it."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nestling import backbones
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target

README = """# {name}, exported by nestling

`model.safetensors` holds the state dict of the {network}'s backbone (fp32), its metadata what builds it:

    from nestling import backbones

    backbone, report = backbones.load({arguments})
    features = backbone.eval()(images)  # features.cls (B, {dim}), features.patches (B, N, {dim})

Images are RGB in [0, 1], normalised by mean {mean} and std {std}.
"""


class Own(Target):
    """`backbones.load(FOLDER)` loads it, bit for bit."""

    name = "nestling"
    tolerance = 0.0

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        """The weights, which say how their network is built, and a page that says how to load them."""
        metadata = {"nestling": json.dumps(subject.facts())}
        save_file(tensors(subject.backbone.state_dict()), folder / "model.safetensors", metadata)
        arguments = '"path/of/this/folder"'
        if not subject.is_built_in:
            arguments += f', name="{subject.name}"'  # the user's word that its code may be imported
        facts = {
            "name": subject.name,
            "arguments": arguments,
            "network": subject.network or "network",
            "dim": subject.backbone.embed_dim,
        }
        (folder / "README.md").write_text(
            README.format(mean=subject.mean, std=subject.std, **facts), encoding="utf-8"
        )
        return {}

    def read(self, subject: Subject, folder: Path) -> Network:
        backbone = backbones.load(folder, subject.name).backbone.eval().requires_grad_(False)

        def network(images: Tensor) -> tuple[Tensor, Tensor]:
            features = backbone(images)
            return features.cls, features.patches

        return network


def tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors takes them: no memory shared, none with holes."""
    return {key: value.detach().clone().contiguous() for key, value in state.items()}
