"""The main recipe, started as a user starts it: real files, real processes."""

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
from image_folder import write_image_folder
from recipes_here import said_here
from safetensors.torch import load_file

from nestling.ssl.errors import Stopped, UserError

BIN = Path(sys.executable).parent
RECIPE = "recipes/dino_xcit.py"
LAUNCH = [str(BIN / "accelerate"), "launch", "--config_file", "launch/configs/single.yaml"]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
TINY = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 2, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "data.num_workers=0"),
    *("head.num_prototypes=64", "head.hidden_dim=32", "head.bottleneck_dim=16", "log.every=1"),
    *("knn.k=5", "knn.size=16", "knn.crop_ratio=1.0", "log.progress=plain"),
]
SHORT = ["train.epochs=2", "optim.warmup_epochs=1", "teacher.temperature_warmup_epochs=1"]
LONGER = ["train.epochs=3", *SHORT[1:]]
SCHEDULES = (
    *("step", "epoch", "lr", "weight_decay", "momentum", "temperature"),
    *("last_layer_frozen", "backbone_frozen"),
)
PUBLISHED = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes/configs").glob("dino_*.yaml"))
TIMES = ("images_per_second", "data_wait")

# The recipe, then what each of its processes ended with, written by each.
KEEP_BOTH = """
import sys
import torch.distributed as dist
from safetensors.torch import save_file
from nestling.recipes.dino_xcit import main
from nestling.ssl import distillation

made, places = [], []
build = distillation.SelfDistillation.__init__

def remember(self, config):
    build(self, config)
    made.append(self)
    places.append((dist.get_rank(), dist.get_world_size()))  # at the end they have parted

distillation.SelfDistillation.__init__ = remember
out, *arguments = sys.argv[1:]
main(arguments)
(method,), ((rank, world),) = made, places
assert world == 2, world
for name in ("student", "teacher", "terms"):
    save_file(getattr(method, name).state_dict(), f"{out}/{name}_{rank}.safetensors")
"""

pytestmark = pytest.mark.slow


def started(command: list[str], repository: Path, expected: int = 0) -> str:
    """Run to the end from the repository's root; returns what was printed, errors included."""
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def killed_at(line: str, command: list[str], repository: Path) -> str:
    """Run until a line begins so, then kill the launcher and all its processes at once; what was printed.

    torchrun gives each of its processes a group of its own, so the launcher's alone would not do.
    """
    said = ""
    with subprocess.Popen(
        command,
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            said += printed
            if printed.startswith(line):
                break
        else:
            raise AssertionError(f"it ended before it printed {line!r}:\n{said}")
        below = psutil.Process(process.pid).children(recursive=True)
        for group in {process.pid, *(os.getpgid(child.pid) for child in below)}:
            os.killpg(group, signal.SIGKILL)
    return said


def pointed(run: Path, name: str) -> Path:
    """The checkpoint that a pointer of the run names."""
    return run / (run / name).read_text().strip()


def test_accelerate_launch_trains_on_a_folder_and_leaves_a_whole_run(image_folder, tmp_path, repository):
    data, run = image_folder(classes=4, per_class=16), tmp_path / "run"
    said = started(
        [
            *(*LAUNCH, RECIPE, f"data.train={data}", f"out={run}", "train.batch_size=8"),
            *("train.precision=fp32", *TINY, *SHORT),
        ],
        repository,
    )
    first = said[: said.index("step 1/")]
    for fact in (
        "1 process on cpu",
        "64 images found",
        "58 to train on, 6 held out for k-NN",
        "global batch 8",
        "steps: 7 per epoch",
    ):
        assert fact in first, first
    for fact in ("base 5.000e-04", "peak 1.563e-05", "linear: global batch / 256"):
        assert fact in first, first
    for row in ("raw pixels", "untrained network", "learned network"):
        assert row in said
    found = {path.name for path in run.iterdir()}
    assert found >= {
        "config.yaml",
        "environment.json",
        "log.jsonl",
        "checkpoints",
        "last",
        "best",
        "picture.png",
    }
    assert records(run)[-1]["step"] == 14
    printed = said_here("eval_knn", [str(run), "knn.k=5"])
    judged = json.loads((run / f"results/knn_{pointed(run, 'best').name}_teacher.json").read_text())
    online = next(record for record in records(run) if record["step"] == judged["step"])
    accuracy = judged["results"]["knn/cls/top1_k5"]
    assert accuracy == online["knn/cls/top1_k5"], "judged afterwards as while it trained"
    assert (judged["num_train"], judged["num_val"], judged["num_classes"]) == (58, 6, 4)
    assert f"{100 * accuracy:.1f}" in printed


@pytest.fixture(scope="module")
def together(tmp_path_factory, repository) -> Path:
    """A folder of images, and a run of two processes that learned from them, each beside what it ended with.

    It is 2 processes x 2 micro-batches x 2 images for 3 epochs of 7 steps.
    """
    folder = tmp_path_factory.mktemp("together")
    write_image_folder(folder / "images", classes=4, per_class=16)
    (folder / "two.py").write_text(KEEP_BOTH)
    command = [*TORCHRUN, str(folder / "two.py"), str(folder), f"out={folder / 'run'}"]
    said = started([*command, *of_two(folder), "log.trackers=tensorboard"], repository)
    assert "2 processes on cpu" in said
    assert "Warning" not in said
    assert "learned network" in said, "results are shared after the trackers have ended"
    assert list((folder / "run").glob("**/events.out.tfevents.*"))
    return folder


def of_two(folder: Path) -> list[str]:
    """The settings of `together`."""
    return [f"data.train={folder / 'images'}", "train.batch_size=2", "train.accumulation=2", *TINY, *LONGER]


def test_two_processes_train_identical_teachers_on_the_schedules_of_one(together, tmp_path):
    images = f"data.train={together / 'images'}"
    said_here("dino_xcit", [images, f"out={tmp_path / 'one'}", "train.batch_size=8", *TINY, *LONGER])

    for name in ("student", "teacher", "terms"):
        zero, one = (load_file(together / f"{name}_{rank}.safetensors") for rank in (0, 1))
        saved = load_file(pointed(together / "run", "last") / f"{name}.safetensors")
        assert zero.keys() == one.keys() == saved.keys()
        for key in zero:
            assert torch.equal(zero[key], one[key]), f"{name}: {key} differs between the processes"
            assert torch.equal(zero[key], saved[key]), f"{name}: {key} was saved otherwise"

    two, alone = records(together / "run")[1:], records(tmp_path / "one")[1:]
    assert len(two) == len(alone) == 21
    for left, right in zip(two, alone, strict=True):
        for schedule in SCHEDULES:
            assert left[schedule] == right[schedule], schedule


def test_two_processes_killed_and_resumed_equal_two_left_alone(together, tmp_path, repository):
    run, whole = tmp_path / "run", together / "run"
    command = [*TORCHRUN, RECIPE, f"out={run}", "resume=auto", *of_two(together)]
    killed_at("step 15/", command, repository)  # the checkpoint of step 14 waited for the one of 7
    step = json.loads((pointed(run, "last") / "trainer.json").read_text())["step"]
    assert 0 < step < 21, "killed between its first checkpoint and its last"
    assert f"resuming from {pointed(run, 'last')} after step {step}" in started(command, repository)

    for name in ("student", "teacher", "terms"):
        resumed, alone = (load_file(pointed(out, "last") / f"{name}.safetensors") for out in (run, whole))
        assert resumed.keys() == alone.keys()
        for key in alone:
            assert torch.equal(resumed[key], alone[key]), f"{name}: {key}"
    resumed_log, alone_log = (
        [{key: value for key, value in record.items() if key not in TIMES} for record in records(out)]
        for out in (run, whole)
    )
    assert resumed_log == alone_log


def test_a_run_goes_on_with_two_processes_for_one_and_back(tmp_path, image_folder, repository):
    """58 images: a step of 8 on one process, one of 12 on two, then steps of 4 on one to the end."""
    data, run = image_folder(classes=4, per_class=16), tmp_path / "run"
    given = [f"data.train={data}", f"out={run}", "resume=auto", *TINY, *SHORT, "knn.every=0"]
    a_step = [*given, "train.max_hours=0"]
    with pytest.raises(Stopped, match=r"train\.max_hours=0\.0 are over; step_00000001 is saved"):
        said_here("dino_xcit", [*a_step, "train.batch_size=8"])
    two = ["train.batch_size=3", "train.accumulation=2"]
    said = started([*TORCHRUN, RECIPE, *a_step, *two], repository, expected=1)  # torchrun's own code
    assert said.count("warning: the run in") == 1
    assert (
        "12 = 3 images x 2 micro-batches x 2 processes, it was 8 = 8 images x 1 micro-batch x 1 proc" in said
    )
    assert "steps per epoch 7 -> 4, steps left 13 -> 8" in said
    assert "step_00000002 is saved" in said
    said = said_here("dino_xcit", [*given, "train.batch_size=4"])
    assert said.count("warning: the run in") == 1
    assert "4 = 4 images x 1 micro-batch x 1 process, it was 12 = 3 images" in said

    left, log = (58 - 8 - 12) // 4, records(run)
    assert [record["step"] for record in log] == list(range(2 + left + 14 + 1))
    assert [record["images_seen"] for record in log] == [0, 8, *range(20, 20 + 4 * left + 4 * 14 + 1, 4)]
    assert [record["epoch"] for record in log if record["images_seen"] in (20 + 4 * left, 112)] == [1, 2]


def test_knn_rises_while_a_small_xcit_trains_for_real(tmp_path):
    """The demo with half of its blocks, two of its epochs and a teacher that follows faster."""
    run = tmp_path / "run"
    settings = [
        *("backbone.options.depth=2", "head.num_prototypes=256", "teacher.momentum=0.98"),
        *("train.epochs=2", "optim.warmup_epochs=0.5", "teacher.temperature_warmup_epochs=1"),
        *("knn.every=1", "data.num_workers=0", "log.progress=plain"),
    ]
    said_here("dino_xcit", [f"out={run}", *settings])
    accuracies = [record["knn/cls/top1_k20"] for record in records(run) if "knn/cls/top1_k20" in record]
    assert len(accuracies) == 3
    assert accuracies[-1] >= accuracies[0] + 0.03, accuracies


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_runs_with_its_model_shrunk_by_overrides_alone(name, image_folder, tmp_path):
    data, run = image_folder(classes=2, per_class=8, size=64), tmp_path / "run"
    recipe = import_module(f"nestling.recipes.dino_{name.split('_')[1]}")
    recipe.main(
        [
            *("--config", name, "data.num_workers=0", f"data.train={data}", f"out={run}"),
            *("backbone.options={embed_dim: 32, depth: 1, num_heads: 4}", "train.batch_size=6"),
            *("train.epochs=1", "head.num_prototypes=128", "optim.warmup_epochs=1"),
            "teacher.temperature_warmup_epochs=1",
        ]
    )
    assert records(run)[-1]["step"] == 2
    weights = load_file(pointed(run, "last") / "teacher.safetensors")
    assert all(value.isfinite().all() for value in weights.values() if value.is_floating_point())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["optim.lrr=1"], "did you mean optim.lr"), (["train.batch_size=100000"], "train.batch_size")],
)
def test_a_users_mistake_is_one_sentence_and_leaves_nothing_behind(arguments, sentence, tmp_path):
    """That a script ends with it and code 2 is shown in tests/ssl/test_command_line.py."""
    given = [f"out={tmp_path / 'run'}", "--config", "dino_xcit_small_12_p16", "data.train=photo-tiles"]
    with pytest.raises(UserError, match=sentence) as caught:
        said_here("dino_xcit", [*given, *arguments])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
