"""Read-outs put together from what is kept, against the read-outs themselves."""

import pytest
import torch

from nestling.backbones import Features
from nestling.ssl.evaluation.linear.columns import Columns
from nestling.ssl.evaluation.readouts import readout


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (
            ["cls", "cls+mean_patch", "last4:cls", "last4:cls+mean_patch"],
            {"last4:cls": 20, "last1:mean_patch": 8},
        ),
        (["last2:mean_patch", "last3:cls"], {"last3:cls": 18, "last2:mean_patch": 14}),
        (["mean_patch"], {"last1:mean_patch": 8}),
    ],
)
def test_read_outs_come_back_bit_for_bit_whatever_the_width_of_a_block(names, kept):
    torch.manual_seed(0)
    widths = [2, 4, 6, 8]
    blocks = [Features(torch.randn(3, width), torch.randn(3, 5, width), (1, 5)) for width in widths]
    columns = Columns([readout(name) for name in names], widths)
    assert columns.kept == kept
    found = columns({name: readout(name)(blocks) for name in columns.kept})
    assert list(found) == names
    assert all(torch.equal(found[name], readout(name)(blocks)) for name in names)
