"""eval_linear as a user starts it: table, numbers, head, and mistakes in one sentence."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from small_probe import task_of, write_probe

from nestling.recipes.eval_linear import main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.saved import load_head, save_head
from nestling.ssl.trained import load_trained

DINO = ["protocol=dino", "linear.epochs=2", "linear.batch_size=4", "linear.lr=[0.5, 1, 1e42]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = write_probe(tmp_path_factory.mktemp("probe"))
    (run.parent / "train/class_1/0002.png").write_bytes(b"broken")
    return run


def results(out):
    return json.loads(out.read_text())


def accuracy(run, out):
    """Of the saved head beside the backbone, counted image by image."""
    task, record = task_of(run), results(out)
    trained = load_trained(run)
    head = load_head(out.parent / record["head"], trained)
    right = []
    for batch in task.centre_views("val"):
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        pixels = (batch.images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        logits = head(trained.backbone.last_blocks(pixels, head.num_blocks))
        for index, label in zip(batch.indices.tolist(), logits.argmax(1).tolist(), strict=True):
            right.append(head.class_names[label] in task.val.path(index))
    return sum(right) / len(right)


@pytest.fixture(scope="module", params=["cached", "dino", "logreg"])
def judged(request, run, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "results.json"
    of_protocol = {
        "cached": ["linear.epochs=10"],
        "dino": DINO[1:],
        "logreg": ["linear.c=[1e-3, 1]", "linear.readouts=[cls, last2:mean_patch]"],
    }
    main([str(run), f"protocol={request.param}", f"out={out}", *of_protocol[request.param]])
    return request.param, out


def test_the_saved_head_beside_the_backbone_reaches_the_reported_accuracy(judged, run):
    _, out = judged
    assert accuracy(run, out) == pytest.approx(results(out)["results"]["top1"])


def test_the_results_say_what_the_head_was_chosen_on_and_what_every_head_reaches(judged):
    protocol, out = judged
    record = results(out)
    heads, chosen = record["results"]["heads"], record["chosen"]
    assert len(heads) == {"cached": 52, "dino": 12, "logreg": 4}[protocol]
    setting = "c" if protocol == "logreg" else "lr"
    assert chosen["on"].startswith("6 images held out of data.train (0.1 of each class)")
    assert record["refit_on_all"] == ("anew on all training images" in chosen["on"]) == (protocol != "dino")
    alive = [head for head in heads if not head["dropped"]]
    best = max(head["held_out_top1"] for head in alive)
    first = next(head for head in alive if head["held_out_top1"] == best)
    assert (first["readout"], first[setting]) == (chosen["readout"], chosen[setting])
    if protocol == "dino":
        assert record["results"]["top1"] == first["test_top1"]
        assert len(record["dropped"]) == 4
        assert all(head["test_top1"] is None for head in heads if head["lr"] == 1e42)
    assert record["results"]["top5"] >= record["results"]["top1"]
    assert (record["num_learned"], record["num_chosen_on"], record["num_test"]) == (23, 6, 18)
    assert (record["num_of_unknown_classes"], record["num_classes"]) == (3, 6)
    assert [path[-16:] for path in record["unreadable"]] == ["class_1/0002.png"]


def test_the_table_names_the_network_and_the_chosen_head_and_a_run_keeps_the_files(run, capsys):
    main([str(run), "linear.epochs=2", "linear.readouts=[cls]", "linear.lr=[0.1]", "linear.holdout=0"])
    printed = " ".join(capsys.readouterr().out.split())
    record = results(run / "results/linear_step_00000007_teacher.json")
    for words in (
        "Linear probe of the teacher of",
        f"test: top-1 {100 * record['results']['top1']:.1f} %, top-5",
        "on 18 images, by cls lr=0.1 chosen on nothing: it is the only head",
    ):
        assert words in printed
    head = load_head(run / "results" / record["head"])
    assert (head.readout.name, head.facts["sha256"]) == ("cls", record["sha256"])
    trained = load_trained(run)
    trained.file.with_name("student.safetensors").write_bytes(b"other weights")
    other = replace(trained, file=trained.file.with_name("student.safetensors"))
    with pytest.raises(UserError, match=r"was trained on .*teacher\.safetensors, not on .*student"):
        load_head(run / "results" / record["head"], other)
    with pytest.raises(UserError, match=r"holds no linear head .*name a file that recipes/eval_linear"):
        load_head(load_trained(run).file)
    with pytest.raises(UserError, match=r"teacher\.safetensors is a weights file.*give data\.train"):
        main([str(trained.file)])
    folders = [run.parent / name for name in ("one", "two")]  # as Hugging Face's
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(folder.name.encode())
    one, two = (replace(trained, file=folder) for folder in folders)
    place = run.parent / "folder.safetensors"
    save_head(place, head.weight.detach(), head.bias.detach(), head.facts | one.facts())
    assert load_head(place, one).class_names == head.class_names
    with pytest.raises(UserError, match=r"was trained on .*one, not on .*two"):
        load_head(place, two)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear.holdout=0"], r"linear\.holdout=0 leaves no image to choose one of 52 heads on"),
        (["linear.lr=[1e39]", "linear.epochs=3"], r"all 4 heads became NaN or infinite"),
        (["linear.readouts=[last9:cls]"], r"last9:cls: xcit_nano_12_p4 shows its last 1 to \d blocks, not 9"),
        (["linear.readouts=[best]"], r"best is no read-out"),
        (["linear.size=2"], r"linear\.size=2"),
        (["linear.size=400000000"], r"^memory ran out .*: give linear\.images_per_pass=64, smaller images"),
        (["linear.precision=fp16"], r"linear\.precision=fp16 needs a GPU"),
        (["data.val=RUN/../train"], r"are both in data\.train"),
        (["protocol=knn"], r"protocol=knn"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    with pytest.raises(UserError, match=message):
        main([str(run), *(argument.replace("RUN", str(run)) for argument in arguments)])


@pytest.mark.slow
def test_two_processes_learn_and_count_what_one_does(run, repository, tmp_path):
    """23 images in steps of 4: in the last step one process has two images, the other one."""
    main([str(run), *DINO, f"out={tmp_path / '1.json'}"])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(repository / "recipes/eval_linear.py")
    subprocess.run(
        [*launcher, script, str(run), *DINO, f"out={tmp_path / '2.json'}"], check=True, timeout=300
    )
    first, second = (results(tmp_path / f"{count}.json") for count in (1, 2))
    assert first["results"] == second["results"]
    assert first["chosen"] == second["chosen"]
    heads = [load_head(tmp_path / f"{count}.safetensors") for count in (1, 2)]
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=1e-4, atol=1e-5)
