"""What varies the images of a fine-tuning: functions of (seed, epoch, index) and of the step."""

import numpy as np
import pytest
import torch
from image_folder import write_image_folder

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.loader import EvalBatch
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.finetuning.data import Mixing, TrainingView, filled, refuse_colors, sets_of
from nestling.ssl.evaluation.finetuning.settings import AUGMENTATIONS, Augment
from nestling.ssl.training import seed_step

IMAGE = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


def view(epoch=0, seed=0, **augment):
    return TrainingView((16, 16), Augment(**augment), (124, 116, 104), seed, epoch)


@pytest.mark.parametrize("colors", AUGMENTATIONS)
def test_a_view_depends_on_seed_epoch_and_index_alone(colors):
    drawn = view(colors=colors, erasing=0.5)
    first = drawn(IMAGE, 3)
    torch.rand(7)  # whatever else drew in between
    state = torch.get_rng_state()
    assert np.array_equal(drawn(IMAGE, 3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.shape, first.dtype) == ((3, 16, 16), np.uint8)
    others = [drawn(IMAGE, 4), view(epoch=1, colors=colors)(IMAGE, 3), view(seed=1, colors=colors)(IMAGE, 3)]
    assert not any(np.array_equal(other, first) for other in others)


def test_without_changes_the_whole_image_is_only_resized():
    whole = view(colors="none", flip=0.0, scale=[1.0, 1.0], ratio=[4 / 3, 4 / 3])
    found = whole(np.full((30, 40, 3), 77, np.uint8), 0)
    assert (found == 77).all()


def test_an_erased_rectangle_has_the_mean_colour():
    found = view(colors="none", erasing=1.0)(np.zeros((30, 40, 3), np.uint8), 0)
    colours = {tuple(pixel) for pixel in found.reshape(3, -1).T.tolist()}
    assert colours == {(0, 0, 0), (124, 116, 104)}


def mixed(step, **augment):
    seed_step(0, step, 0)
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    return Mixing(Augment(**augment), 5)(images, torch.tensor([0, 1, 2, 3]))


def test_mixing_is_a_function_of_the_step_and_labels_follow_the_pixels():
    both = [mixed(step) for step in range(12)]
    for step, (images, labels) in enumerate(both):
        again, _ = mixed(step)
        assert torch.equal(images, again)
        torch.testing.assert_close(labels.sum(1), torch.ones(4))
        shown = images.mean((1, 2, 3))  # pixels of image i are i, so that their mean tells the shares
        torch.testing.assert_close(shown, labels @ torch.arange(5.0))
    has_edges = {bool((images.std((1, 2, 3)) > 1e-6).any()) for images, _ in both}
    assert has_edges == {True, False}  # CutMix and mixup take turns


def test_without_mixing_labels_are_one_hot():
    images, labels = mixed(0, mixup=0.0, cutmix=0.0)
    assert labels.tolist() == torch.eye(5)[:4].tolist()
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_readable_images_stand_in_for_unreadable_ones():
    pixels = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)
    indices, images = filled(EvalBatch(torch.tensor([7, 9]), pixels, []), 5)
    assert indices.tolist() == [7, 9, 7, 9, 7]
    assert images[:, 0, 0, 0].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(UserError, match=r"no image of a batch can be read, such as a\.png: is empty"):
        filled(EvalBatch(torch.empty(0), pixels[:0], [Failure(0, "a.png", "is empty")]), 5)


def test_the_epoch_is_chosen_on_images_of_every_class_that_has_two(tmp_path):
    several, single, val = (
        Folder(str(write_image_folder(tmp_path / name, classes=3, per_class=count, size=8)))
        for name, count in (("several", 8), ("single", 1), ("val", 1))
    )
    sets = sets_of(several, val, 0.25, 0)
    assert sets.choice is not None
    assert sets.choice.labels.tolist() == [0, 0, 1, 1, 2, 2]
    paths = [
        part.source.path(index) for part in (sets.train, sets.choice) for index in range(len(part.labels))
    ]
    assert sorted(paths) == [several.path(index) for index in range(24)]
    with pytest.raises(
        UserError, match=r"train\.choose_on_train=0\.25 finds no class with two images or more"
    ):
        sets_of(single, val, 0.25, 0)


def test_colours_of_images_without_are_refused():
    with pytest.raises(UserError, match=r"augment\.colors=jitter takes images of 1 or 3 channels, not 5"):
        refuse_colors(Augment(colors="jitter"), 5)
    refuse_colors(Augment(colors="none"), 5)
