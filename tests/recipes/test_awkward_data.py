"""Folders as users have them, from end to end: every bad file named once, every good one used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from awkward_images import Awkward, write_awkward_folder

from nestling.ssl.data.ledger import FILE, unreadable
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


@pytest.mark.parametrize(
    ("launcher", "workers"), [(ALONE, 0), (ALONE, 2), (TWO, 0), (TWO, 2)], ids=["1x0", "1x2", "2x0", "2x2"]
)
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
    assert records[-1]["replaced_images"] > 0
    assert all(record["loss"] is not None for record in records[1:])

    said = started([*launcher, "recipes/eval_knn.py", str(run), f"data.num_workers={workers}"], repository)
    check_named_once(awkward, said)
    (results,) = run.glob("checkpoints/*/knn.json")
    record = json.loads(results.read_text())
    assert record["num_train"] + record["num_val"] == len(awkward.readable)
    assert {Path(path) for path in record["unreadable"]} == set(awkward.unreadable)


def test_more_bad_files_than_allowed_end_the_run_in_one_line(awkward, tmp_path, repository):
    given = [f"data.train={awkward.root}", f"out={tmp_path / 'run'}", "data.num_workers=0"]
    said = started([*ALONE, "recipes/dino_xcit.py", *given, *TINY, "data.max_bad_share=0.1"], repository, 2)
    assert "images can't be read, more than data.max_bad_share=0.1 allows" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_asked_to_raise_a_run_ends_at_the_first_bad_file(awkward, tmp_path, repository):
    given = [f"data.train={awkward.root}", f"out={tmp_path / 'run'}", "data.num_workers=2"]
    said = started([*ALONE, "recipes/dino_xcit.py", *given, *TINY, "data.on_error=raise"], repository, 2)
    last = said.splitlines()[-1]
    assert any(f"{printable(path)}: " in last for path in awkward.unreadable)
    assert "Traceback" not in said


@pytest.mark.parametrize("labels", [True, False])
def test_a_folder_of_nothing_but_bad_files_ends_at_once(tmp_path, repository, labels):
    for number in range(40):
        folder = tmp_path / "images" / (f"class_{number % 2}" if labels else "all")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(b"no image")
    given = [f"data.train={tmp_path / 'images'}", f"out={tmp_path / 'run'}", "data.num_workers=2"]
    said = started([*ALONE, "recipes/dino_xcit.py", *given, *TINY], repository, 2)
    last = said.splitlines()[-1]
    assert ("images can't be read" in last) if labels else ("none of" in last and "is no image" in last)
    assert "Traceback" not in said
