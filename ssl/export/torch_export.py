"""A graph for torch alone: it runs where nestling is not installed, and can be compiled ahead of time."""

from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from nestling.ssl.export.graph import graph_sizes, sides, traced
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target

FILE = "model.pt2"


class TorchExport(Target):
    """`torch.export.load(FILE).module()(images)` returns cls and patches."""

    name = "torch_export"

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        program = traced(subject)
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(program, folder / FILE)
        return sides(subject)

    def read(self, subject: Subject, folder: Path) -> Network:
        network: Network = torch.export.load(folder / FILE).module()
        return network

    def sizes(self, subject: Subject) -> list[Size]:
        return graph_sizes(subject)
