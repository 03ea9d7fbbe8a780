"""Views are distributed as those of torchvision and Pillow, composed as DINO composes them.

Four statistics of each view (mean, spread, gradient energy, chroma), for each kind of view (first global,
second global, local), less their mean over the photograph they come from. Both sides draw for themselves.

Power: `DRAWS` draws a side tell two means apart that differ by d standard deviations with probability 0.99
where d = (z(1 - ALPHA / 2) + z(0.99)) * sqrt(2 / DRAWS): 0.33 for global views and 0.12 for local ones. The
Kolmogorov-Smirnov test, at the same level, watches the whole distribution.
"""

import io
import random
from functools import partial
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from scipy.stats import ks_2samp
from torchvision import transforms

from nestling.ssl.config import Views
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.photo_tiles import photograph
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.plan import Planned
from nestling.ssl.views.render import render

pytestmark = pytest.mark.slow

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "china")
DRAWS = 600
ALPHA = 1e-3
KINDS = ("global 1", "global 2", "local")
SIZES = 64, 24
BLUR_SIGMA = (0.1, 2.0)


class Photo(NamedTuple):
    content: bytes
    image: Image.Image


@pytest.fixture(scope="module")
def photos():
    """As JPEGs whose boxes are two to three times as large as their views: decoded at a half as a rule."""
    made = []
    for name in PHOTOGRAPHS:
        whole = Image.fromarray(photograph(name))
        buffer = io.BytesIO()
        ImageOps.fit(whole, (360, 270), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        made.append(Photo(buffer.getvalue(), Image.open(buffer).convert("RGB")))
    return made


def published(size, scale, blur, solarize):
    """One view as DINO's transforms make it, without the way to floats."""

    def blurred(image):
        if random.random() >= blur:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*BLUR_SIGMA)))

    def solarized(image):
        return ImageOps.solarize(image) if random.random() < solarize else image

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            transforms.RandomGrayscale(0.2),
            blurred,
            solarized,
        ]
    )


def theirs(photos, sizes):
    torch.manual_seed(0)
    random.seed(0)
    large, small = sizes
    one = published(large, (0.4, 1), 1.0, 0.0)
    two = published(large, (0.4, 1), 0.1, 0.2)
    local = published(small, (0.05, 0.4), 0.5, 0.0)
    for draw in range(DRAWS):
        image = photos[draw % len(photos)].image
        yield [np.asarray(view(image)).transpose(2, 0, 1) for view in (one, two, *[local] * 8)]


def ours(photos, sizes, cfg, scaled=True):
    for draw in range(DRAWS):
        plan = Planned(partial(generator, 0, Stream.VIEWS, 0, draw), cfg, *sizes)
        photo = photos[draw % len(photos)]
        image = Decoder().content(photo.content, "photo", plan if scaled else None)
        width, height = photo.image.size
        yield [render(view, image) for view in plan.of(height, width, image.shape)]


def statistics(views):
    """Shape: (views, C, S, S) -> (views, 4)"""
    levels = np.stack(views).astype(np.float32)
    gray = levels.mean(axis=1)
    energy = [np.square(np.diff(gray, axis=axis)).mean(axis=(1, 2)) for axis in (1, 2)]
    chroma = (levels.max(axis=1) - levels.min(axis=1)).mean(axis=(1, 2))
    columns = gray.mean(axis=(1, 2)), gray.std(axis=(1, 2)), np.log1p(sum(energy)), chroma
    return np.stack(columns, axis=1)


def measured(views_of_draws):
    """Statistics by kind of view, (draws, views, 4)."""
    pairs = [(statistics(views[:2]), statistics(views[2:])) for views in views_of_draws]
    large, small = (np.stack(side) for side in zip(*pairs, strict=True))
    return {"global 1": large[:, :1], "global 2": large[:, 1:], "local": small}


def differences(mine, other):
    """(z of the means, p of Kolmogorov and Smirnov) by kind of view and statistic."""
    found = {}
    count = len(PHOTOGRAPHS)
    for kind in KINDS:
        sides = [values[kind].reshape(DRAWS // count, count, -1, 4) for values in (mine, other)]
        centre = np.concatenate(sides).mean(axis=(0, 2), keepdims=True)
        one, two = [(side - centre).reshape(-1, 4) for side in sides]
        for number, name in enumerate(("mean", "spread", "gradient energy", "chroma")):
            a, b = one[:, number], two[:, number]
            z = (a.mean() - b.mean()) / sqrt(a.var() / len(a) + b.var() / len(b))
            found[kind, name] = abs(z), ks_2samp(a, b).pvalue
    return found


def told_apart(found):
    most = NormalDist().inv_cdf(1 - ALPHA / 2)
    return {place for place, (z, p) in found.items() if z > most or p < ALPHA}


@pytest.fixture(scope="module")
def reference(photos):
    return measured(theirs(photos, SIZES))


def test_views_are_distributed_as_the_published_ones(photos, reference):
    plans = [
        Planned(partial(generator, 0, Stream.VIEWS, 0, i), Views(), *SIZES)(270, 360) for i in range(DRAWS)
    ]
    assert np.mean(np.array(plans) == 2) > 0.9  # so it is the scaled decoding that is judged
    assert told_apart(differences(measured(ours(photos, SIZES, Views())), reference)) == set()


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"global_blur": [0.0, 0.1]}, {("global 1", "gradient energy")}),
        ({"grayscale": 0.0}, {(kind, "chroma") for kind in KINDS}),
        ({"saturation": 0.0, "brightness": 0.0}, {("local", "mean")}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_views_are_told_apart(wrong, where, photos, reference):
    assert where <= told_apart(differences(measured(ours(photos, SIZES, Views(**wrong))), reference))


def test_scaled_decoding_moves_no_statistic_by_a_tenth_of_its_deviation(photos):
    """The same draws with and without it, so that 0.1 standard deviations are far beyond chance."""
    scaled, whole = (measured(ours(photos, SIZES, Views(), scaled)) for scaled in (True, False))
    for kind in KINDS:
        moved = (scaled[kind] - whole[kind]).mean(axis=(0, 1)) / whole[kind].std(axis=(0, 1))
        assert np.abs(moved).max() < 0.1, (kind, moved)
