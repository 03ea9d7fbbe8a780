"""finetune_detection on drawn shapes: the loss falls, the detector loads, mistakes are one sentence."""

import json

import pytest
import torch
from coco_shapes import write_shapes
from safetensors.torch import save_file

from nestling import backbones
from nestling.recipes.finetune_detection import main
from nestling.ssl.command_line import read, write
from nestling.ssl.config import Backbone, Config, Data, Views
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection.finetune import prepared
from nestling.ssl.evaluation.detection.model import load_detector
from nestling.ssl.evaluation.detection.settings import FineTuneDetection
from nestling.ssl.trained import load_trained

NETWORKS = {
    "xcit_nano_12_p16": {"embed_dim": 16, "depth": 3, "num_heads": 2},
    "vit_tiny_p14": {"embed_dim": 16, "depth": 3, "num_heads": 2},  # its patch divides none of the strides
    "swin_tiny_w7": {"embed_dim": 8, "depth": 2, "num_heads": 1},
}
SMALL = [
    *("train.batch_size=2", "train.precision=fp32", "optim.warmup_steps=1", "optim.lr=1e-3"),
    *("model.min_size=[64]", "model.max_size=96", "model.out_channels=16", "data.num_workers=0"),
    *("model.rois=8", "model.detections=2"),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    file = write_shapes(tmp_path_factory.mktemp("shapes"))
    content = json.loads(file.read_text())
    content["images"] = content["images"][:2]
    shown = {image["id"] for image in content["images"]}
    content["annotations"] = [item for item in content["annotations"] if item["image_id"] in shown]
    content["categories"].append({"id": 1, "name": "never seen in training"})
    content["annotations"].append({**content["annotations"][0], "id": 99, "category_id": 1})
    file.with_name("val.json").write_text(json.dumps(content))
    return file


def written_run(folder, name):
    """A run of a tiny network of that family."""
    checkpoint = folder / "run/checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    torch.manual_seed(0)
    state = backbones.create(name, **NETWORKS[name]).state_dict()
    save_file({f"backbone.{key}": value for key, value in state.items()}, checkpoint / "teacher.safetensors")
    config = Config(data=Data(train=str(folder)), backbone=Backbone(name, 0.0, NETWORKS[name]))
    config.views = Views(global_size=[112])
    write(config, checkpoint / "config.yaml")
    return folder / "run"


def given(run, shapes, out, *more):
    val = shapes.with_name("val.json")
    images = [f"data.train={shapes}", f"data.val={val}"]
    images += [f"data.{side}_images={shapes.parent / 'images'}" for side in ("train", "val")]
    return [str(run), *images, *SMALL, f"out={out}", *more]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_detector_of_each_family_learns_and_loads(name, shapes, tmp_path):
    out = tmp_path / "out"
    arguments = given(written_run(tmp_path, name), shapes, out, "train.epochs=3")
    main(arguments)
    history = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in history] == [2, 4, 6]
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    found = json.loads((out / "results/detection.json").read_text())
    assert found["classes"] == ["disc", "box"]  # by their ids
    assert {"box/map", "box/map_50", "mask/map", "mask/map_75"} <= found["results"].keys()
    assert all(0 <= value <= 1 for key, value in found["results"].items() if key != "epoch")

    network, names = load_detector(out)
    network.roi_heads.score_thresh = 0.0
    image = torch.rand(3, 50, 70)
    with torch.no_grad():
        (seen,) = network([image])
    assert names == ["disc", "box"]
    assert len(seen["boxes"]) > 0
    assert seen["masks"].shape == (len(seen["boxes"]), 1, 50, 70)
    assert set(seen["labels"].tolist()) <= {1, 2}
    state = torch.load(out / "state.pt")["network"]
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    inside = backbones.load(out / "model.safetensors").backbone.state_dict()
    assert all(torch.equal(value, state[f"backbone.backbone.{key}"]) for key, value in inside.items())
    if name == "swin_tiny_w7":
        check_that_it_goes_on(arguments, tmp_path / "again", history, state)


def check_that_it_goes_on(arguments, out, history, state):
    """A run that ended after its first epoch and goes on equals one left alone."""
    out.mkdir()
    settings = read(FineTuneDetection, arguments, program="", positional=("checkpoint",))
    trainer, _ = prepared(settings, load_trained(settings.checkpoint))
    trainer.state.history.append(next(trainer.epochs()))
    trainer.state.save(out, trainer.accelerator)
    main([*(text for text in arguments if not text.startswith("out=")), f"out={out}", "resume=auto"])
    again = torch.load(out / "state.pt")
    assert again["history"] == history
    assert all(torch.equal(value, again["network"][key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segmentation": None}, r"instance 1 has no segmentation that can be drawn"),
        ({"segmentation": [[]]}, r"changed\.json: instance 1 has no segmentation that can be drawn"),
        ({"category_id": 9}, r"no COCO-style json of instances \(KeyError\(9\)\)"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(change, message, shapes, tmp_path):
    content = json.loads(shapes.read_text())
    content["annotations"][0] |= change
    (tmp_path / "changed.json").write_text(json.dumps(content))
    arguments = given(written_run(tmp_path, "vit_tiny_p14"), shapes, tmp_path / "out", "train.epochs=1")
    with pytest.raises(UserError, match=message):
        main([text.replace(f"train={shapes}", f"train={tmp_path / 'changed.json'}") for text in arguments])
