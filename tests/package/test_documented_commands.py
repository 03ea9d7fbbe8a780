"""Every command that README and docs show is run: the recipes here, shrunk; make and pip by .ci/run."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_folder import write_image_folder

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("accelerate", "make", "nestling", "pip", "python", "torchrun")
SHRUNK = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=1", "data.num_workers=0"),
    *("head.num_prototypes=16", "head.hidden_dim=16", "head.bottleneck_dim=8", "knn.k=3", "knn.size=16"),
    *("train.epochs=1", "train.batch_size=4", "optim.warmup_epochs=0", "teacher.temperature_warmup_epochs=0"),
]


def commands() -> Iterator[str]:
    """The command lines of all fenced blocks without a language, without comments and ellipses."""
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                command = line.partition(" #")[0].replace("…", "").strip()
                if command.split(" ")[0] in PROGRAMS:
                    yield command


SHOWN = sorted(set(commands()))
BY_CI = [command for command in SHOWN if command.split()[0] in ("make", "pip") or "slurm" in command]
STARTED = [command for command in SHOWN if command not in BY_CI]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images, a finished run and a YAML of one's own."""
    folder = tmp_path_factory.mktemp("documented")
    write_image_folder(folder / "images", classes=2, per_class=8, size=20)
    write_image_folder(folder / "others", classes=2, per_class=4, size=20, seed=1)
    (folder / "my.yaml").write_text(f"data: {{train: {folder / 'images'}}}\n")
    call(
        [
            sys.executable,
            "recipes/dino_xcit.py",
            f"data.train={folder / 'images'}",
            f"out={folder / 'run'}",
            *SHRUNK,
        ]
    )
    return folder


def call(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def shrunk(command: str, folder: Path, out: Path) -> list[str]:
    """The command with its paths replaced by the fixture's, and made small by overrides."""
    checkpoint = folder / "run" / (folder / "run" / "last").read_text().strip()
    command = re.sub(r"runs/\w+/checkpoints/\w+", str(checkpoint), command)
    command = re.sub(r"runs/\w+", str(folder / "run"), command)
    command = re.sub(r"(data\.train=)\S+", rf"\1{folder / 'images'}", command)
    command = re.sub(r"(data\.val=)\S+", rf"\1{folder / 'others'}", command)
    command = command.replace("my.yaml", str(folder / "my.yaml"))
    program, *arguments = shlex.split(command)
    pretrains = "dino_xcit" in command and "--help" not in command and "eval_knn" not in command
    if pretrains:
        given = [argument for argument in arguments if "=" in argument]
        named = {argument.partition("=")[0] for argument in given}
        images = [f"data.train={folder / 'images'}"] if "data.train" not in named else []
        arguments = [
            argument for argument in arguments if argument not in given or argument.startswith("data.")
        ]
        arguments += [f"out={out}", *images, *SHRUNK]
    return [str(BIN / program), *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTED)
def test_a_documented_command_works_as_written(command, folder, tmp_path):
    assert call(shrunk(command, folder, tmp_path / "run")) or "eval" in command


def test_commands_were_found_on_every_page_that_shows_some():
    assert len(STARTED) >= 10
    assert {"make demo", "make test"} <= set(SHOWN)


def test_what_is_not_started_here_is_run_by_ci():
    ci = (ROOT / ".ci" / "run").read_text() + (ROOT / ".ci" / "smoke").read_text()
    install = (ROOT / "Makefile").read_text()
    for command in BY_CI:
        if command.startswith("make"):
            assert command in ci, command
        elif command.startswith("pip"):
            assert "pip install" in install, command
        else:
            assert (ROOT / "tests" / "launch" / "test_slurm.py").exists(), command
