"""A run that is killed again and again, at any moment, ends as the one that was left alone."""

import json
from pathlib import Path

import pytest
import torch
from fresh_scripts import ran
from image_folder import write_image_folder

from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

TIMES = ("images_per_second", "data_wait")

# Every life is a start of the recipe with resume=auto, ended by SIGKILL at a drawn moment: anywhere, after
# a step, while a checkpoint is written, or while k-NN judges. Where it was is read from the stacks that it
# dumps just before.
LIVES = """
    import faulthandler, json, os, random, re, signal, sys, time
    from pathlib import Path
    from forked_recipes import TINY, begun, code_of
    from nestling.recipes.dino_xcit import main

    images, folder = sys.argv[1], Path(sys.argv[2])
    killed = folder / "killed"
    stacks = folder / "stacks"
    dumps = stacks.open("w")
    faulthandler.register(signal.SIGUSR2, dumps, all_threads=False)  # those of others may crash it
    settings = [
        *TINY, f"data.train={images}", "backbone.name=xcit_nano_12_p4", "data.num_workers=1",
        "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}", "resume=auto", "train.batch_size=8",
        "train.epochs=20", "train.checkpoint_every=0.3", "train.keep_last=2", "knn.every=0.5",
        "knn.batch_size=2",
    ]

    def start(name):
        return begun(main, [*settings, f"out={folder / name}"], folder / f"said_{name}")

    def saved():
        return max((int(path.name[5:]) for path in (killed / "checkpoints").glob("step_*")), default=0)

    def calls(child):
        before = size = stacks.stat().st_size
        os.kill(child, signal.SIGUSR2)
        for _ in range(100):
            time.sleep(0.002)
            size, old = stacks.stat().st_size, size
            if size == old > before:
                break
        return set(re.findall(r"in (\\w+)$", stacks.read_text()[before:], re.MULTILINE))

    def writing():
        return [*(killed / "checkpoints").glob(".step_*.writing")]

    def until(condition, child, pause=0.001):
        end = time.monotonic() + 120
        while not condition():
            assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it has ended"
            assert time.monotonic() < end, (places, (folder / "said_killed").read_text()[-3000:])
            time.sleep(pause)

    def far(before):
        return saved() > before + 8  # on a busy machine a moment may be missed, and the run must not end

    def wait_for_the_moment(kind, child, before):
        if kind == "anywhere":
            time.sleep(draw.uniform(0, 2))
        elif kind == "step":
            until(lambda: saved() > before, child)
            time.sleep(draw.uniform(0, 0.15))
        elif kind == "saving":
            until(lambda: saved() > before, child)
            until(lambda: writing() or far(before), child)
            time.sleep(draw.uniform(0, 0.01))
        else:
            # Not more often, as Linux starts a fork over at each signal.
            until(lambda: "_judged" in calls(child) or far(before), child, 0.04)
            time.sleep(draw.uniform(0, 0.05))

    alone = start("alone")
    assert code_of(alone) == 0, (folder / "said_alone").read_text()
    draw = random.Random(0)
    kinds = 5 * ["anywhere", "step", "saving", "judging"]
    draw.shuffle(kinds)
    places, steps = [], []
    for kind in kinds:
        before, child = saved(), start("killed")
        wait_for_the_moment(kind, child, before)
        called = calls(child) & {"_judged", "train"}
        places.append(sorted(called | {"saving"} if "train" in called and writing() else called))
        os.kill(child, signal.SIGKILL)
        code = code_of(child)
        assert code == -signal.SIGKILL, (code, (folder / "said_killed").read_text()[-3000:])
        steps.append(saved())
    assert code_of(start("killed")) == 0, (folder / "said_killed").read_text()[-3000:]
    print(json.dumps({"kinds": kinds, "places": places, "steps": steps}))
"""


def log_of(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if key not in TIMES} for line in read(run / "log.jsonl")
    ]


@pytest.mark.slow
def test_a_run_killed_at_twenty_moments_ends_as_the_one_left_alone(tmp_path, repository):
    images = write_image_folder(tmp_path / "images", classes=4, per_class=16)
    done = ran(LIVES, images, tmp_path, repository)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["places"]) == 20
    for name in ("saving", "_judged"):
        assert sum(name in place for place in told["places"]) >= 2, name
    assert sum("train" in place and "_judged" not in place for place in told["places"]) >= 2
    assert told["steps"] == sorted(told["steps"]), "no checkpoint was lost"
    assert len(set(told["steps"])) > 5, "lives got on"

    one, other = (checkpoints.load(checkpoints.newest(tmp_path / name)) for name in ("killed", "alone"))
    assert one.trainer == other.trainer
    for part in checkpoints.TENSORS:
        tensors, expected = getattr(one, part), getattr(other, part)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in expected), part
    assert one.optimizer["param_groups"] == other.optimizer["param_groups"]
    assert one.optimizer["state"].keys() == other.optimizer["state"].keys()
    for key, moments in other.optimizer["state"].items():
        assert all(torch.equal(one.optimizer["state"][key][name], moments[name]) for name in moments)
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "alone")
    for name in (checkpoints.LAST, checkpoints.BEST):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "alone" / name).read_text()
    assert not [path.name for path in (tmp_path / "killed").rglob(".*")], "no litter"
    assert not (tmp_path / "killed" / "run.lock").exists()
