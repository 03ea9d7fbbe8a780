"""The file of a linear head, and how it loads beside its backbone.

    trained = load_trained("runs/pretrain")
    head = load_head("runs/pretrain/results/linear_step_00001000_teacher.safetensors", trained)
    logits = head(trained.backbone.last_blocks(images, head.num_blocks))

Shapes used below: B images, C classes, D channels of the read-out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nestling.backbones import Features
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.readouts import readout
from nestling.ssl.names import printable
from nestling.ssl.run.disk import replaced, share
from nestling.ssl.trained import Trained, weights_sha256

FACTS = "nestling_head"  # in the metadata of the file


class LinearHead(nn.Module):
    """A linear classifier on a read-out of a backbone.

    `class_names` are those of the training images; `facts` say which backbone it belongs to (`sha256` of its
    weights) and how it sees images (`size`, `crop_ratio`).
    """

    def __init__(self, weight: Tensor, bias: Tensor, facts: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.facts = facts
        self.readout = readout(facts["readout"])
        self.class_names: list[str] = facts["class_names"]

    @property
    def num_blocks(self) -> int:
        """How many last blocks it reads."""
        return self.readout.num_blocks

    def forward(self, blocks: Features | Sequence[Features]) -> Tensor:
        """Logits of what a backbone returned: `backbone(images)` where it reads the last block alone, or
        `backbone.last_blocks(images, head.num_blocks)`.

        Shape:
            Features of B images -> (B, C)
        """
        vectors = self.readout([blocks] if isinstance(blocks, Features) else blocks)
        return F.linear(vectors.to(self.weight.dtype), self.weight, self.bias)


def save_head(path: Path, weight: Tensor, bias: Tensor, facts: dict[str, Any]) -> None:
    """Write `head.weight` (C, D) and `head.bias` (C,) as safetensors, the facts in its metadata.

    Raises:
        UserError: it can't be written.
    """
    tensors = {"head.weight": weight.contiguous(), "head.bias": bias.contiguous()}
    with replaced(path) as draft:
        save_file(tensors, draft, {FACTS: json.dumps(facts)})
        share(draft)


def load_head(path: str | Path, trained: Trained | None = None) -> LinearHead:
    """The head in a file that recipes/eval_linear.py wrote, in evaluation mode.

    With `trained` it must belong to those weights.

    Raises:
        UserError: no such head is there, or it belongs to other weights.
    """
    path = Path(path).expanduser()
    try:
        with safe_open(path, "pt") as content:
            facts = json.loads((content.metadata() or {})[FACTS])
            head = LinearHead(content.get_tensor("head.weight"), content.get_tensor("head.bias"), facts)
    except FileNotFoundError:
        raise UserError(
            f"{printable(path)}: no such file; name one that recipes/eval_linear.py wrote"
        ) from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{printable(path)} holds no linear head ({error}); name a file that recipes/eval_linear.py wrote"
        ) from error
    if trained is not None and weights_sha256(trained.file) != facts["sha256"]:
        raise UserError(
            f"{printable(path)} was trained on {printable(facts['weights'])}, not on "
            f"{printable(trained.file)}: the weights differ (sha256)"
        )
    return head.eval().requires_grad_(False)
