"""Every comparison that `make bench` makes, small: each checks first that both sides compute the same."""

import json
import os
import subprocess
import sys

import pytest

FAMILIES = ("xcit_small_12_p16", "vit_small_p16", "swin_tiny_w7")
LOSS_PEERS = ("pair loop, as in the paper",) * 2
LAYER_PEERS = ("own layer, then log-sum-exp", "torch weight_norm, then pair loop")
VIEW_PEERS = ("torchvision v1 as DINO composes",) * 2 + ("lightly DINOTransform", "torchvision v2 on tensors")
KNN_PEERS = ("one search per k, torch", "one search per k, faiss")
ROWS = [
    *(("4 x 10 x 2048, fp32", peer) for peer in (*LOSS_PEERS, "lightly DINOLoss")),
    *(("4 x 10 x 2048, bf16", peer) for peer in LOSS_PEERS),
    *(("fp32", peer) for peer in (*LAYER_PEERS, "lightly by view, then DINOLoss")),
    *(("bf16", peer) for peer in LAYER_PEERS),
    *(("views of 500 x 375", peer) for peer in VIEW_PEERS),
    *(("views of 1600 x 1200", peer) for peer in VIEW_PEERS),
    ("loader's share, 4 images", "torchvision v1, as DINO composes"),
    ("colours of 4 images", "the same in the loader"),
    *((f"xcit_small_12_p16 {what}", "timm") for what in ("step fp32", "forward fp32", "step bf16")),
    *((f"xcit_tiny_12_p16 {what}", "timm") for what in ("step fp32", "forward fp32")),
    *((f"vit_small_p16 {what}", "timm") for what in ("step fp32", "forward fp32", "step bf16")),
    ("Swin-T step, 224 px", "timm"),
    ("Swin-T step, 224 px", "torchvision"),
    ("Swin-T step, 2 x 224 + 8 x 96 px", "torchvision"),
    ("Swin-T step, bf16, 96 px", "torchvision"),
    ("clipping, one gradient in ten above", ""),
    ("moving average", ""),
    ("AdamW", ""),
    ("clipping, AdamW, moving average", ""),
    ("clipping, all gradients above", ""),
    *((f"activation checkpointing, {name}", "without") for name in FAMILIES),
    *((f"channels-last, patches of {name}", "contiguous") for name in FAMILIES[1:] for _ in range(2)),
    ("XCiT-T12/16, blocks compiled, fp32", ""),
    ("whole step, XCiT-T12/16, fp32", "timm, pair loss, parameter loops"),
    ("whole step with its views, XCiT-T12/16, fp32", ""),
    *((f"k-NN 1000 x 100 x 384, {backend}", peer) for backend in ("torch", "faiss") for peer in KNN_PEERS),
    ("k-NN 2000 x 200 x 384, torch", "one search per k, torch"),
]


@pytest.mark.slow
def test_every_part_is_checked_and_compared_with_its_peers(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/bench.py", "--quick", "--threads", "1"]
    command += ["--device", "cpu"]
    # What compiling costs is no matter here, and blocks that are not compiled equal those that should not be.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, "--json", "rows.json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(ROWS)
    for row, (part, peer) in zip(rows, ROWS, strict=True):
        assert part in row["part"]
        assert peer in row["peer"]
