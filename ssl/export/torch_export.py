"""A graph for torch alone: it runs where nestling is not installed, and can be compiled ahead of time."""

from pathlib import Path
from typing import Any

import torch

from nestling.ssl.export.graph import graph_sizes, smallest_side, traced
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target

FILE = "model.pt2"


class TorchExport(Target):
    """`torch.export.load(FILE).module()(images)` returns cls and patches."""

    name = "torch_export"

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        torch.export.save(traced(subject), folder / FILE)
        return {"smallest_side": smallest_side(subject.backbone)}

    def read(self, folder: Path) -> Network:
        network: Network = torch.export.load(folder / FILE).module()
        return network

    def sizes(self, subject: Subject) -> list[Size]:
        return graph_sizes(subject)
