"""eval_unlabelled as a user starts it: the table, the file, and mistakes in one sentence."""

import json
import subprocess
import sys

import pytest
from small_trained import write_trained

from nestling.recipes.eval_unlabelled import main
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
from nestling.ssl.run.loading import load_backbone


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("unlabelled"))


def test_a_run_is_judged_on_its_held_out_images_and_the_results_written(run, capsys):
    main([str(run)])
    record = json.loads((run / "results/unlabelled_step_00000007_teacher.json").read_text())
    backbone, config = load_backbone(run / "checkpoints/step_00000007", "teacher")
    expected = UnlabelledJudge(open_source(config.data, "val"), config).judge(backbone, "cpu")
    assert record["results"] == expected
    assert (record["num_images"], record["images"], record["other"]) == (16, str(run.parent / "val"), None)
    printed = capsys.readouterr().out
    for words in ("rankme/cls", "alignment/mean_patch", f"{expected['features/rankme/cls']:.4g}"):
        assert words in printed


def test_two_networks_are_compared_on_the_same_images(run, tmp_path, capsys):
    out = tmp_path / "two.json"
    images = [f"data.val={run.parent / 'train'}"]
    shared = [
        f"out={out}",
        "other_network=student",
        "k=[3, 5]",
        "knn.pooling=[cls]",
        "max_images=20",
        *images,
    ]
    main([str(run), f"other={run}", f"others=[{run / 'bare.safetensors'}]", *shared])
    record = json.loads(out.read_text())
    assert record["num_images"] == 20
    assert 0 < record["results"]["features/jaccard/cls_k3"] < record["results"]["features/overlap/cls_k3"] < 1
    assert record["other"]["network"] == "student"
    assert record["other"]["config"] == record["config"]  # of one run, with what was given in its place
    assert record["config"]["data"]["val"] == str(run.parent / "train")
    assert (record["config"]["knn"]["pooling"], record["config"]["knn"]["max_val"]) == (["cls"], 20)
    own, other = (found["results"]["features/rankme/cls"] for found in (record, record["other"]))
    assert own != other
    (third,) = record["others"]  # the student's weights once more
    expected = record["other"]["results"] | {n: v for n, v in record["results"].items() if "_k" in n}
    assert third["results"] == pytest.approx(expected)
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    told = {row[1]: row[2] for row in rows if len(row) > 3}
    assert {told["run teacher"], told["run student"]} == {f"{own:.4g}", f"{other:.4g}"}
    assert list(told) == (
        ["run teacher", "run student", "bare.safetensors"]
        if own > other
        else ["run student", "bare.safetensors", "run teacher"]
    )


def test_two_networks_stand_side_by_side_with_what_they_share(run, tmp_path, capsys):
    shared = ["other_network=student", "k=[3]", "knn.pooling=[cls]", f"out={tmp_path / 'pair.json'}"]
    main([str(run), f"other={run}", *shared])
    printed = capsys.readouterr().out
    for words in ("run teacher", "run student", "overlap/cls_k3"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "other=RUN"], r"run is given twice"),
        (["RUN", "other=RUN/nothing"], r"nothing: no such (file|folder)"),
        (["RUN", "knn.pooling=[clss]"], r"clss is no read-out"),
        (["RUN", "knn.size=2"], r"knn\.size=2"),
        (["RUN", "knn.size=400000000"], r"^memory ran out.*: give knn\.batch_size=64, smaller images or a"),
        (["RUN/bare.safetensors"], r"is a weights file, which names no images: give data\.train"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    with pytest.raises(UserError, match=message):
        main([argument.replace("RUN", str(run)) for argument in arguments])


@pytest.mark.slow
def test_two_processes_write_what_one_writes(run, repository, tmp_path):
    settings = [f"other={run}", "other_network=student", "k=[3]"]
    main([str(run), f"out={tmp_path / 'one.json'}", *settings])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script, out = str(repository / "recipes/eval_unlabelled.py"), tmp_path / "two.json"
    subprocess.run([*launcher, script, str(run), f"out={out}", *settings], check=True, timeout=300)
    one, two = (json.loads(file.read_text())["results"] for file in (tmp_path / "one.json", out))
    assert two == pytest.approx(one, rel=1e-4)
