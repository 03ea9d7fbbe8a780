"""Runs that have little memory: real processes, and a limit that the system itself enforces."""

import subprocess
import sys
from pathlib import Path

import pytest
from image_folder import write_image_folder

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2"]
SETTINGS = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 128, depth: 2, num_heads: 4}"),
    *("views.global_size=64", "views.local_size=8", "views.num_local=1", "data.num_workers=0"),
    *("head.num_prototypes=64", "head.hidden_dim=32", "head.bottleneck_dim=16", "data.holdout=0"),
    *(
        "train.epochs=1",
        "data.epoch_images=64",
        "optim.warmup_epochs=0",
        "teacher.temperature_warmup_epochs=0",
        "log.progress=plain",
        "train.precision=fp32",
    ),
]

# The recipe, where the last of the processes may take so many megabytes more than it has at the start.
LIMITED = """
import os, resource, sys
import torch, torch.distributed, accelerate, torchvision
from nestling.recipes.dino_xcit import main
from nestling.ssl import pretraining
from nestling.ssl.command_line import run
from nestling.ssl.run.memory import status

if os.environ.get("RANK", "1") == "1":
    limit = status("VmSize") + int(sys.argv[1]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
run(main, sys.argv[2:])
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")]


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("memory")
    (root / "limited.py").write_text(LIMITED)
    images = write_image_folder(root / "images", classes=2, per_class=64, size=64)
    return [str(root / "limited.py"), "1100", f"data.train={images}", *SETTINGS]


def test_two_processes_agree_on_the_batch_that_fits_into_the_smaller_memory(command, tmp_path, repository):
    done = subprocess.run(
        [*TORCHRUN, *command, f"out={tmp_path / 'run'}", "train.batch_size=auto"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    found = int(said.split("train.batch_size=auto: ")[1].split(",")[0])
    assert f"{found}, the most that fit (" in said
    assert 2 <= found < 32, "not as many as fill a step"
    assert f"\n  batch_size: {found}\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert f"step {64 // (2 * found)}/{64 // (2 * found)}" in said, "the run had memory for it"


def test_a_run_out_of_memory_says_in_one_sentence_what_to_lower(command, tmp_path, repository):
    done = subprocess.run(
        [sys.executable, *command, f"out={tmp_path / 'run'}", "train.batch_size=64"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: memory ran out in training (it asked for ")
    assert "give train.batch_size=32 train.accumulation=2 in the place of 64 and 1" in done.stderr
    assert done.stderr.count("\n") == 1
