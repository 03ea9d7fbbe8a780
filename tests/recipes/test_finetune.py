"""finetune as a user starts it: what it writes, how it goes on, mistakes in one sentence."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from full_disks import files_of_at_most
from image_folder import write_image_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nestling import backbones
from nestling.recipes.finetune import main
from nestling.ssl.command_line import read, write
from nestling.ssl.config import Backbone, Config, Data, Knn, Views
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection.model import load_detector
from nestling.ssl.evaluation.finetuning.finetune import joined, prepared
from nestling.ssl.evaluation.finetuning.model import load_classifier
from nestling.ssl.evaluation.finetuning.settings import FineTune
from nestling.ssl.evaluation.finetuning.state import claimed
from nestling.ssl.evaluation.settings import override
from nestling.ssl.trained import load_trained
from nestling.ssl.views.evaluation import eval_view
from nestling.ssl.views.render import normalize

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}
SMALL = [
    *("train.epochs=4", "train.batch_size=8", "train.precision=fp32", "optim.warmup_epochs=1"),
    *("optim.lr=0.3", "augment.mixup=0.2", "augment.cutmix=0.2", "augment.erasing=0.2"),
    *("augment.magnitude=1", "augment.scale=[0.5, 1]", "train.choose_on_train=0.25"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """`run`, with one checkpoint, its images, one of which is damaged, and a finished fine-tuning `done`."""
    folder = tmp_path_factory.mktemp("finetune")
    train = write_image_folder(folder / "train", classes=6, per_class=8, size=20)
    val = write_image_folder(folder / "val", classes=6, per_class=3, size=20, seed=1)
    (val / "class_0" / "0000.png").write_bytes(b"\x89PNG is damaged")
    checkpoint = folder / "run/checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    torch.manual_seed(0)
    state = backbones.create("xcit_nano_12_p4", mask_token=True, **OPTIONS).state_dict()
    save_file({f"backbone.{key}": value for key, value in state.items()}, checkpoint / "teacher.safetensors")
    config = Config(
        data=Data(train=str(train), val=str(val), num_workers=0),
        backbone=Backbone("xcit_nano_12_p4", 0.1, {**OPTIONS, "mask_token": True}),
        views=Views(global_size=[16]),
        knn=Knn(crop_ratio=1.0),
    )
    write(config, checkpoint / "config.yaml")
    main([str(folder / "run"), *SMALL, f"out={folder / 'done'}"])
    return folder


def settings_of(world, *arguments):
    names = {text.partition("=")[0] for text in arguments}
    small = [text for text in SMALL if text.partition("=")[0] not in names]
    given = [str(world / "run"), *small, *arguments]
    return read(FineTune, given, program="", positional=("checkpoint",))


def records(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_results_are_those_of_the_epoch_that_training_images_chose(world):
    found = json.loads((world / "done/results/finetune.json").read_text())
    history = records(world / "done")
    assert [record["epoch"] for record in history] == [1, 2, 3, 4]
    assert [record["step"] for record in history] == [4, 8, 12, 16]  # 36 images of 48 fill 4 steps of 8
    best = max(history, key=lambda record: record["choice/top1"])
    assert found["results"] == {
        "top1": best["val/top1"],
        "top5": best["val/top5"],
        "epoch": best["epoch"],
    }
    assert (found["num_train"], found["num_choice"], found["num_val"]) == (36, 12, 18)
    assert [Path(path).name for path in found["unreadable"]] == ["0000.png"]
    assert (found["backbone"], found["network"], found["size"]) == ("xcit_nano_12_p4", "teacher", 16)
    assert found["config"]["data"]["train"] == str(world / "train")
    assert yaml.safe_load((world / "done/config.yaml").read_text())["optim"]["lr"] == 0.3


def test_the_saved_network_gives_the_reported_accuracy_and_its_backbone_loads(world):
    loaded = load_classifier(world / "done")
    mean, std = normalisation(Data())
    val = open_source(Data(train=str(world / "val"), num_workers=0), "train")
    assert val.class_names == loaded.class_names
    readable = [index for index in range(len(val)) if not val.path(index).endswith("class_0/0000.png")]
    pixels = torch.stack([torch.from_numpy(eval_view(val.load(i), 16, 1.0)) for i in readable])
    with torch.no_grad():
        right = loaded.network(normalize(pixels, mean, std)).argmax(1) == torch.from_numpy(
            val.labels[readable]
        )
    written = json.loads((world / "done/results/finetune.json").read_text())["results"]["top1"]
    assert float(right.double().mean()) == written
    trained = load_trained(world / "done/model.safetensors")
    assert (trained.size, trained.config.knn.crop_ratio) == (16, 1.0)
    inside = loaded.network.backbone.state_dict()
    assert all(torch.equal(value, inside[key]) for key, value in trained.backbone.state_dict().items())


@pytest.mark.slow
def test_an_interrupted_run_that_goes_on_equals_one_left_alone(world, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    settings = settings_of(world)
    trained = load_trained(settings.checkpoint)
    override(trained.config, "data", settings.data)
    trainer, _ = prepared(settings, trained)
    trainer.state.history.append(next(trainer.epochs()))
    trainer.state.save(out, trainer.accelerator)  # and here it ends
    main([str(world / "run"), *SMALL, f"out={out}", "resume=auto"])
    alone, together = (torch.load(path / "state.pt") for path in (world / "done", out))
    assert together["history"] == alone["history"]
    assert all(torch.equal(value, together["network"][key]) for key, value in alone["network"].items())


def test_the_classifier_learns_and_unused_parameters_stay(world):
    before = load_trained(world / "run").backbone.state_dict()
    after = load_file(world / "done/model.safetensors")
    assert torch.equal(after["backbone.mask_token"], before["mask_token"])
    assert not torch.equal(
        after["backbone.patch_embed.proj.0.0.weight"], before["patch_embed.proj.0.0.weight"]
    )
    history = records(world / "done")
    assert history[-1]["loss"] < history[0]["loss"]


def trained_once(world, *arguments):
    """The loss of one epoch, and the weights after it."""
    trainer = trainer_of(world, "train.epochs=1", *arguments)
    loss = next(trainer.epochs())["loss"]
    return loss, torch.cat([value.flatten().double() for value in trainer.state.network.parameters()])


def trainer_of(world, *arguments):
    settings = settings_of(world, *arguments)
    trained = load_trained(settings.checkpoint)
    override(trained.config, "data", settings.data)
    return prepared(settings, trained)[0]


def test_each_setting_reaches_training(world):
    loss, weights = trained_once(world)
    again = trained_once(world)
    assert again[0] == loss
    assert torch.equal(again[1], weights)
    for other in (
        "optim.layer_decay=0.5",
        "augment.mixup=0",
        "augment.cutmix=0",
        "augment.label_smoothing=0",
    ):
        other_loss, other_weights = trained_once(world, other)
        assert not torch.equal(other_weights, weights), other
        assert other_loss != loss, other


def test_the_loss_of_a_step_is_the_cross_entropy_with_smoothed_labels(world):
    unmixed = ("augment.mixup=0", "augment.cutmix=0", "model.drop_path=0", "augment.label_smoothing=0.3")
    trainer = trainer_of(world, *unmixed)
    indices = torch.arange(8)
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    mean, std = normalisation(Data())
    with torch.no_grad():
        scores = trainer.state.network.train()(normalize(images, mean, std)).log_softmax(1)
    own = scores[indices, trainer.sets.train.labels[indices]]
    by_hand = -(0.7 * own + 0.3 * scores.mean(1)).mean()  # 0.3 of each label over all six classes
    assert float(trainer._step(0, indices, images)) == pytest.approx(float(by_hand), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=DONE"], r"holds a fine-tuning; resume=auto"),
        (["out=DONE", "resume=auto", "optim.lr=0.1"], r"began with optim\.lr=0\.3, now it is 0\.1"),
        (["out=RUN"], r"no fine-tuning; name a new folder"),
        (["train.batch_size=64"], r"36 training images don't fill .* at most 36"),
        (["model.readout=last9:cls"], r"last9:cls: xcit_nano_12_p4 shows"),
        (["augment.size=2"], r"augment\.size=2"),
        (["augment.size=400000000"], r"^memory ran out .*: give train\.batch_size=4, smaller images or"),
        (["data.val=FLAT"], r"needs labelled images and data\.val=.*flat"),
        (["optim.layerdecay=1"], r"did you mean optim\.layer_decay"),
    ],
)
def test_a_mistake_is_one_sentence(world, tmp_path, arguments, message):
    flat = tmp_path / "flat"
    shutil.copytree(world / "val/class_1", flat)
    places = {"DONE": world / "done", "RUN": world / "run", "FLAT": flat}
    given = [re.sub("DONE|RUN|FLAT", lambda found: str(places[found[0]]), text) for text in arguments]
    names = {text.partition("=")[0] for text in given}
    small = [text for text in SMALL if text.partition("=")[0] not in names]
    out = [] if "out" in names else [f"out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=message):
        main([str(world / "run"), *small, *given, *out])


def test_a_full_disk_is_one_sentence_and_the_next_start_begins(world, tmp_path):
    given = [str(world / "run"), *SMALL, f"out={tmp_path / 'out'}"]
    with files_of_at_most(3000), pytest.raises(UserError, match=r"state\.pt can't be written: File too"):
        main(given)
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "out/.state.pt.writing").write_text("of a killed one")
    assert claimed(str(tmp_path / "out"), "never") == tmp_path / "out"


def test_a_damaged_or_foreign_file_is_one_sentence(world, tmp_path):
    file, changed = world / "done/model.safetensors", tmp_path / "changed.safetensors"
    changed.write_bytes(file.read_bytes()[:-100])
    for load in (load_classifier, load_detector):
        with pytest.raises(UserError, match=r"changed\.safetensors holds no "):
            load(changed)
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    tensors = load_file(file)
    save_file({**tensors, "head.bias": tensors["head.bias"][:-1]}, changed, metadata)
    with pytest.raises(UserError, match=r"holds no fine-tuned classifier .*size mismatch"):
        load_classifier(changed)
    with pytest.raises(UserError, match=r"is a weights file, which names no images"):
        main([str(file), f"data.val={world / 'val'}", f"out={tmp_path / 'out'}"])


@pytest.mark.parametrize("name", ["torchvision:resnet18", "torch.nn:Flatten"])
def test_a_network_without_drop_path_is_told_which_key_to_set(world, name):
    settings = settings_of(world)
    trained = load_trained(settings.checkpoint)
    override(trained.config, "data", settings.data)
    trained.config.backbone.name, trained.config.backbone.options = name, {}
    with pytest.raises(UserError, match=r"^model\.drop_path=0\.1: .*not 0\.1; set model\.drop_path=0$"):
        prepared(settings, trained)


def test_the_published_settings_are_legal_and_want_their_images_named(repository):
    configs = repository / "recipes/configs"
    given = ["run", "--config", "finetune_deit", "data.train=/images"]
    with pytest.raises(UserError, match=r"data\.val is missing"):
        read(FineTune, given, program="", configs=configs, positional=("checkpoint",))
    found = read(FineTune, [*given, "data.val=/v"], program="", configs=configs, positional=("checkpoint",))
    assert found.optim.lr * 2 == 5e-4  # DeiT's is for 512 images
    assert (found.train.epochs, found.optim.layer_decay, found.augment.erasing) == (300, 1.0, 0.25)


@pytest.mark.slow
def test_two_processes_judge_each_image_once_and_end_alike(world, tmp_path, repository):
    """Of 18 images of val one is unreadable: counting the rest once gives seventeenths."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    small = ["train.epochs=1", "train.batch_size=4", "train.precision=fp32", "augment.cutmix=0"]
    given = [str(world / "run"), *small, f"out={tmp_path}"]
    subprocess.run([*launcher, str(repository / "recipes/finetune.py"), *given], check=True, timeout=300)
    (record,) = records(tmp_path)
    assert record["step"] == 6  # 48 images, 2 x 4 at a time
    handler = joined("fp32").ddp_handler  # else each forward would begin with the statistics of process 0
    assert handler is not None
    assert not handler.broadcast_buffers
    assert (17 * record["val/top1"]) % 1 == pytest.approx(0, abs=1e-9)
    network = load_classifier(tmp_path).network
    state = torch.load(tmp_path / "state.pt")["network"]
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
