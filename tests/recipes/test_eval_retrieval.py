"""eval_retrieval as a user starts it, on a made benchmark of colours."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_subjects import noisy, tiny_backbone, write_landmarks, write_tiny_run

from nestling.recipes.eval_retrieval import main
from nestling.ssl.config import Data
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.alone import read_ahead
from nestling.ssl.evaluation.retrieval.describing import SCALES, Describer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run and a made benchmark."""
    folder = tmp_path_factory.mktemp("retrieval")
    write_tiny_run(folder / "run")
    write_landmarks(folder / "set")
    return folder


def judged(place, *arguments):
    main(
        [str(place / "run"), str(place / "set"), "pooling=mean_patch", f"out={place}/found.json", *arguments]
    )
    return json.loads((place / "found.json").read_text())


def test_a_box_finds_what_it_shows_and_the_whole_image_less(place, capsys):
    found = judged(place)
    results = found["results"]
    assert results["medium/map"] > 0.9
    assert results["hard/map"] > 0.8
    assert (found["num_images"], found["num_queries"], found["unreadable"]) == (12, 3, [])
    assert f"{100 * results['medium/map']:.1f}" in capsys.readouterr().out
    assert judged(place, "crop_queries=false")["results"]["medium/map"] < results["medium/map"] - 0.1
    scaled = judged(place, "multiscale=true", "size=36")
    assert scaled["results"]["medium/map"] > 0.9
    assert (found["scales"], scaled["scales"]) == ([1.0], pytest.approx([1, 0.7071, 0.5], abs=1e-4))


def test_an_unreadable_image_is_left_out_and_listed(place):
    file = place / "set/jpg/more/0_1.jpg"
    kept = file.read_bytes()
    file.write_bytes(b"no image")
    try:
        assert judged(place)["unreadable"] == [str(file)]
        with pytest.raises(UserError, match=r"such as .*0_1\.jpg.*, more than max_bad_share=0"):
            judged(place, "max_bad_share=0")
    finally:
        file.write_bytes(kept)


def test_a_vector_is_the_normalised_mean_over_the_scales():
    backbone, cpu = tiny_backbone(), torch.device("cpu")
    image = noisy(np.eye(33, dtype=int), 0)[:21]
    describer = Describer(backbone, Data(), 100, "cls", SCALES, cpu)
    pixels = (
        torch.from_numpy(image.copy()).permute(2, 0, 1)[None] / 255 - describer_mean()
    ) / describer_std()
    sizes = [(21, 33), (15, 23), (10, 16)]
    shown = [
        F.interpolate(pixels, size, mode="bilinear") if number else pixels
        for number, size in enumerate(sizes)
    ]
    mean = sum(backbone(one).cls[0] for one in shown) / 3
    assert torch.allclose(describer(image), F.normalize(mean, dim=0), atol=1e-4)


def describer_mean():
    return torch.tensor([0.485, 0.456, 0.406])[None, :, None, None]


def describer_std():
    return torch.tensor([0.229, 0.224, 0.225])[None, :, None, None]


def test_images_come_in_order_however_long_each_takes():
    import time

    def load(path):
        time.sleep(0.01 * (int(path) % 3))
        return np.array([int(path)])

    assert [int(image[0]) for image in read_ahead(load, [str(number) for number in range(25)])] == list(
        range(25)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["folder=nowhere"], r"folder=nowhere holds no folder jpg"),
        (["pooling=best"], r"best is no read-out"),
        (["ground_truth=no.pkl"], r"no\.pkl can't be read as ground truth: .*No such file"),
        (["pooling=last50:cls"], r"last50:cls: .* not 50"),
    ],
)
def test_a_mistake_is_one_sentence(place, arguments, message):
    folder = [] if arguments[0].startswith("folder=") else [f"folder={place / 'set'}"]
    with pytest.raises(UserError, match=message):
        main([str(place / "run"), *folder, *arguments])
