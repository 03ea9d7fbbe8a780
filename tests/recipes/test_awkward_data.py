"""Folders as users have them, from end to end: every bad file named once, every good one used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from awkward_images import Awkward, write_awkward_folder
from recipes_here import said_here

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.data.ledger import FILE, unreadable
from nestling.ssl.data.order import StepSampler, steps_per_epoch
from nestling.ssl.data.sources.opening import open_pair
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

BIN = Path(sys.executable).parent
ALONE = [sys.executable]
TWO = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
TINY = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=1", "train.epochs=2"),
    *("head.num_prototypes=16", "head.hidden_dim=16", "head.bottleneck_dim=8", "train.batch_size=3"),
    *(
        "optim.warmup_epochs=0",
        "teacher.temperature_warmup_epochs=0",
        "knn.k=3",
        "knn.size=16",
        "log.every=1",
    ),
    "log.progress=plain",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Awkward:
    return write_awkward_folder(tmp_path_factory.mktemp("data") / "awkward")


def started(command: list[str], repository: Path, expected: int = 0) -> str:
    """What a recipe says, started from the repository's root in an environment that knows only ASCII."""
    ran = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = (ran.stdout + ran.stderr).decode("utf-8", "backslashreplace")
    assert ran.returncode == expected, said
    return said


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if "left out" in line]


def check_named_once(awkward: Awkward, said: str) -> None:
    lines = warnings(said)
    assert len(lines) == len(awkward.unreadable), said
    for path, reason in awkward.unreadable.items():
        (line,) = (line for line in lines if f"left out {printable(path)}: " in line)
        assert reason in line
    assert "Traceback" not in said


def expected_replacements(run: Path, awkward: Awkward, processes: int) -> int:
    """How many of the samples of the last epoch are of unreadable files."""
    config = read(Config, [], program="test", default=run / "config.yaml")
    images, _ = open_pair(config)
    steps = steps_per_epoch(len(images), config, processes)
    asked = [
        ref.image
        for process in range(processes)
        for refs in StepSampler(len(images), config, 2 * steps, process, processes, start_step=steps)
        for ref in refs
    ]
    return sum(Path(images.path(image)) in awkward.unreadable for image in asked)


@pytest.mark.parametrize(("launcher", "workers"), [(ALONE, 0), (TWO, 2)], ids=["1x0", "2x2"])
def test_training_and_knn_name_each_bad_file_once_and_use_all_others(
    awkward, tmp_path, repository, launcher, workers
):
    run, found = tmp_path / "run", len(awkward.readable) + len(awkward.unreadable)
    given = [f"data.train={awkward.root}", f"data.num_workers={workers}", "data.max_bad_share=0.5"]
    said = started([*launcher, "recipes/dino_xcit.py", *given, f"out={run}", *TINY], repository)
    check_named_once(awkward, said)
    assert f"{2 if launcher is TWO else 1} process" in said
    assert f"{found} images found" in said
    assert "passed over in" in said
    kept = unreadable(run / FILE)
    assert {Path(path) for path in kept} == set(awkward.unreadable)
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert records[-1]["replaced_images"] == expected_replacements(run, awkward, 2 if launcher is TWO else 1)
    assert all(record["loss"] is not None for record in records[1:])

    judge = [str(run), f"data.num_workers={workers}"]
    if launcher is TWO:
        said = started([*launcher, "recipes/eval_knn.py", *judge], repository)
    else:
        said = said_here("eval_knn", judge)
    check_named_once(awkward, said)
    (results,) = run.glob("results/knn_*.json")
    record = json.loads(results.read_text())
    assert record["num_train"] + record["num_val"] == len(awkward.readable)
    assert {Path(path) for path in record["unreadable"]} == set(awkward.unreadable)


def refused(arguments: list[str]) -> str:
    """The one line that a pretraining ends with."""
    with pytest.raises(UserError) as caught:
        said_here("dino_xcit", [*arguments, *TINY])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_more_bad_files_than_allowed_end_the_run_in_one_line(awkward, tmp_path):
    given = [f"data.train={awkward.root}", f"out={tmp_path / 'run'}", "data.num_workers=0"]
    last = refused([*given, "data.max_bad_share=0.1"])
    assert " of 43 images can't be read" in last
    assert "more than data.max_bad_share=0.1 allows" in last


def test_asked_to_raise_a_run_ends_at_the_first_bad_file(awkward, tmp_path, repository):
    given = [f"data.train={awkward.root}", f"out={tmp_path / 'run'}", "data.num_workers=2"]
    said = started([*ALONE, "recipes/dino_xcit.py", *given, *TINY, "data.on_error=raise"], repository, 2)
    last = said.splitlines()[-1]
    assert any(f"{printable(path)}: " in last for path in awkward.unreadable)
    assert "Traceback" not in said


@pytest.mark.parametrize("missing", [True, False])
def test_nothing_but_bad_files_ends_at_once(tmp_path, missing):
    for number in range(40):
        (tmp_path / f"{number}.jpg").write_bytes(b"no image")
    rows = [f"{'gone_' * missing}{number}.jpg,{'ab'[number % 2]}\n" for number in range(40)]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(rows))
    given = [f"data.train={tmp_path / 'list.csv'}", f"out={tmp_path / 'run'}", "data.num_workers=2"]
    last = refused(given)
    assert "none of 20 images tried" in last
    assert ("is not there" if missing else "is no image") in last
