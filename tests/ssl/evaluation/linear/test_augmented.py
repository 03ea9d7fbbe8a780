"""Heads on augmented images against a plain loop, and the crops against torchvision."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_probe import task_of, write_probe
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from nestling.ssl.data.order import epoch_order
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.augmented import Augmented, EpochBatches, RandomCrop
from nestling.ssl.evaluation.linear.heads import HeadSpec, first_heads

SPECS = [HeadSpec("cls", "lr", 0.5), HeadSpec("last4:cls+mean_patch", "lr", 0.1)]
SETTINGS = {"epochs": 2, "batch_size": 8, "images_per_pass": 5, "seed": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def task(run):
    return task_of(run, **SETTINGS)


LEARNED = np.array([0, 2, 3, 4, 7, 11, 12, 19, 21, 22, 29])


def written_out(task, spec):
    """One image, one nn.Linear and one of torch's optimizers at a time."""
    weight, bias = first_heads([spec], task.widths, 6, 3, "cpu").one(spec)
    layer = nn.Linear(weight.shape[1], 6)
    layer.load_state_dict({"weight": weight, "bias": bias})
    optimizer = torch.optim.SGD(layer.parameters(), lr=spec.value * 8 / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for epoch in range(2):
        crop = RandomCrop((16, 16), [0.08, 1.0], [0.75, 4 / 3], 0.5, 3, epoch)
        order = LEARNED[epoch_order(11, 3, epoch)]
        for part in (order[:8], order[8:]):
            pixels = np.stack([crop(task.train.load(index), index) for index in part])
            images = (torch.from_numpy(pixels) / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
            blocks = task.trained.backbone.last_blocks(images, 4)
            used = blocks if spec.readout.startswith("last4") else blocks[-1:]
            vectors = [block.cls for block in used]
            vectors += [blocks[-1].patches.mean(1)] if "mean_patch" in spec.readout else []
            optimizer.zero_grad()
            F.cross_entropy(
                layer(torch.cat(vectors, 1)), torch.from_numpy(task.train_labels[part])
            ).backward()
            optimizer.step()
            schedule.step()
    return layer


def test_the_grid_learns_what_a_plain_loop_learns_and_leaves_the_backbone_alone(task):
    before = {name: value.clone() for name, value in task.trained.backbone.state_dict().items()}
    random = torch.get_rng_state()
    grid = Augmented(task).fit(SPECS, LEARNED)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in task.trained.backbone.state_dict().items())
    for spec in SPECS:
        alone, (weight, bias) = written_out(task, spec), grid.one(spec)
        torch.testing.assert_close(weight, alone.weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bias, alone.bias.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_loader_processes_change_nothing(task, run):
    with_two = task_of(run, **SETTINGS)
    with_two.data.num_workers = 2
    ours, theirs = (Augmented(each).fit(SPECS, LEARNED) for each in (task, with_two))
    assert all(map(torch.equal, ours.parameters, theirs.parameters))


def test_the_shares_of_several_processes_are_the_steps_of_one(task):
    alone = [*EpochBatches(task, LEARNED)]
    shares = [
        [*EpochBatches(replace(task, process=process, num_processes=4), LEARNED)] for process in range(4)
    ]
    for step, (epoch, indices) in enumerate(alone):
        parts = [share[step] for share in shares]
        assert {each for each, _ in parts} == {epoch}
        assert sorted(index for _, part in parts for index in part) == sorted(indices)
    assert [len(share[1][1]) for share in shares] == [1, 1, 1, 0]


def test_a_crop_is_torchvisions_and_of_seed_epoch_and_index_alone():
    image = np.random.default_rng(0).integers(256, size=(60, 90, 3), dtype=np.uint8)
    crop = RandomCrop((32, 24), [0.08, 1.0], [0.75, 4 / 3], 1.0, 0)
    drawn = [crop(image, index) for index in range(40)]
    again = RandomCrop((32, 24), [0.08, 1.0], [0.75, 4 / 3], 1.0, 0)
    assert all(np.array_equal(each, again(image, index)) for index, each in enumerate(drawn))
    later = RandomCrop((32, 24), [0.08, 1.0], [0.75, 4 / 3], 1.0, 0, epoch=1)
    assert not any(np.array_equal(each, later(image, index)) for index, each in enumerate(drawn))
    unflipped = RandomCrop((32, 24), [0.08, 1.0], [0.75, 4 / 3], 0.0, 0)(image, 0)
    assert np.array_equal(unflipped[..., ::-1], drawn[0])
    whole = RandomCrop((32, 24), [1.0, 1.0], [1.5, 1.5], 0.0, 0)(image, 0)
    resize = v2.Resize((32, 24), interpolation=InterpolationMode.BICUBIC, antialias=True)
    planes = torch.from_numpy(image).permute(2, 0, 1)
    assert np.array_equal(whole, resize(planes).numpy())
    of_pillow = np.asarray(resize(Image.fromarray(image))).transpose(2, 0, 1)
    assert np.abs(whole.astype(int) - of_pillow).max() <= 1


def test_standardising_is_refused_before_any_work(run):
    with pytest.raises(UserError, match=r"linear\.standardise=true is for protocol=cached"):
        Augmented(task_of(run, standardise=True))
