"""One ONNX file whose batch, height and width stay free; of a foreign network the batch alone."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.export.graph import AXES, graph_sizes, sides, traced
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target

FILE = "model.onnx"
OPSET = 18  # with the format's version 10, which torch writes, onnxruntime 1.18 and later run it
LIMIT = 2**31  # bytes of a protobuf message, and so of one ONNX file
CHATTY = ("onnxscript", "onnx_ir", "torch.onnx")


class Onnx(Target):
    """Input `images`, outputs `cls` and `patches`; its metadata say how to prepare images."""

    name = "onnx"
    loader = "onnxruntime"
    packages = ("onnx", "onnxscript", "onnxruntime")

    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        """One file, which takes what the module says.

        Raises:
            UserError: a package is missing, or the weights are more than an ONNX file holds.
        """
        try:
            import onnx
            import onnxscript  # noqa: F401  (torch's exporter is written in it)
        except ImportError as error:
            raise UserError(
                f"--to onnx needs {error.name}, which is not installed; pip install 'nestling[export]'"
            ) from error
        size = sum(value.nbytes for value in subject.backbone.state_dict().values())
        if size > 0.99 * LIMIT:
            raise UserError(
                f"--to onnx: {subject.name} has {size / 2**30:.1f} GiB of weights and an ONNX file "
                "holds 2; --to torch_export takes it"
            )
        program = traced(subject)
        with silence():
            exported = torch.onnx.export(
                program,
                input_names=["images"],
                output_names=["cls", "patches"],
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        assert exported is not None
        model = exported.model_proto
        name_axes(model)
        strip(model)
        facts = {**subject.facts(), **sides(subject)}
        onnx.helper.set_model_props(
            model, {key: text if isinstance(text, str) else json.dumps(text) for key, text in facts.items()}
        )
        onnx.save(model, folder / FILE)
        return {"opset": OPSET, **sides(subject)}

    def read(self, subject: Subject, folder: Path) -> Network:
        """By onnxruntime on the CPU, with as many threads as torch has."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / FILE, options, providers=["CPUExecutionProvider"])

        def network(images: Tensor) -> tuple[Tensor, Tensor]:
            cls, patches = session.run(["cls", "patches"], {"images": images.numpy()})
            return torch.from_numpy(cls), torch.from_numpy(patches)

        return network

    def sizes(self, subject: Subject) -> list[Size]:
        return graph_sizes(subject)


def name_axes(model: Any) -> None:
    """Call the free axes by their names instead of the tracer's symbols."""
    batch, _, height, width = model.graph.input[0].type.tensor_type.shape.dim
    for axis, name in zip((batch, height, width), AXES, strict=True):
        if not axis.HasField("dim_value"):
            axis.dim_param = name
    for output in model.graph.output:
        first, *rest = output.type.tensor_type.shape.dim
        first.dim_param = AXES[0]
        if len(rest) == 2 and not rest[0].HasField("dim_value"):
            rest[0].dim_param = "patches"


def strip(model: Any) -> None:
    """Drop the exporter's notes on each node, which hold paths of this machine and double a small file."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")


@contextmanager
def silence() -> Iterator[None]:
    """Keep the exporter's progress, hints and warnings about itself from the user's screen."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
