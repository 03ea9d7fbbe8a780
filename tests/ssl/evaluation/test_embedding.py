"""A backbone from Python: one image in whatever form is one vector."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from awkward_images import write_awkward_folder
from export_subjects import write_run
from image_folder import texture
from PIL import Image, UnidentifiedImageError
from safetensors.torch import save_file
from torch import nn

import nestling
from nestling import backbones
from nestling.ssl.errors import UserError
from nestling.ssl.run.loading import load_backbone


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return nestling.load(write_run(tmp_path_factory.mktemp("embed") / "run", "vit"))


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(texture(seed, 80, np.random.default_rng(seed)))


def test_importing_nestling_imports_no_torch():
    code = "import sys, nestling; assert callable(nestling.load); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_image_is_the_same_as_path_text_pil_and_array(model, tmp_path):
    images = [picture(seed) for seed in range(3)]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    paths = sorted(tmp_path.iterdir())
    vectors = model.embed(paths)
    assert vectors.shape == (3, model.dim) == (3, 32)
    assert vectors.dtype == np.float32
    arrays = [np.asarray(image) for image in images]
    forms = [map(str, paths), images, arrays, np.stack(arrays), [paths[0], images[1], arrays[2]]]
    forms.append([array.transpose(2, 0, 1) for array in arrays])
    for form in forms:
        assert np.array_equal(model.embed(form), vectors)
    assert np.array_equal(model.embed(list(reversed(paths))), vectors[::-1])
    for one in (paths[1], str(paths[1]), images[1], arrays[1]):
        assert np.array_equal(model.embed(one), vectors[1:2])
    assert np.abs(model.embed(iter(paths), batch_size=2) - vectors).max() < 1e-5
    assert model.embed([]).shape == (0, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.embed(picture(), batch_size=0), r"^batch_size=0: "),
        (lambda model: nestling.load(model.trained.file, size=0), r"^size=0: "),
        (lambda model: model.embed(7), r"^image 0 is a int; give a path"),
        (lambda model: model.embed(np.array(7)), r"^image 0"),
        (lambda model: model.embed([picture(), None]), r"^image 1 is a NoneType; give"),
    ],
)
def test_what_is_no_image_or_no_number_of_them_is_one_sentence(model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


def test_vectors_are_those_of_the_backbone_on_what_preprocess_gives(model):
    pixels = torch.stack([model.preprocess(picture(seed)) for seed in range(2)])
    assert pixels.shape == (2, 3, 64, 64)
    with torch.no_grad():
        before, last = model.backbone.last_blocks(pixels, 2)
    images = [picture(0), picture(1)]
    assert np.array_equal(model.embed(images), last.cls.numpy())
    wide = torch.cat([before.cls, last.cls, last.patches.mean(1)], 1)
    assert np.abs(model.embed(images, pooling="last2:cls+mean_patch") - wide.numpy()).max() < 1e-6


def test_any_file_that_pillow_opens_and_the_image_it_opens_are_equal(model, tmp_path):
    """Turned by EXIF, of palettes, of 1, 16 and 32 bits, CMYK, transparent, animated."""
    seen = set()
    for path in write_awkward_folder(tmp_path / "images").readable:
        try:
            image = Image.open(path)
        except UnidentifiedImageError:  # .npy
            continue
        with image:
            seen.add(image.mode)
            assert np.array_equal(model.embed(path), model.embed(image)), path
    assert {"RGB", "RGBA", "LA", "P", "1", "I;16", "F", "CMYK"} <= seen


def test_what_is_no_image_is_named(model, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    picture().save(tmp_path / "good.png")
    for given, message in (
        ([tmp_path / "good.png", tmp_path / "bad.png"], r"bad\.png: is no image"),
        (tmp_path / "none.png", r"none\.png"),
        ([picture(), np.zeros((5, 6, 7), np.uint8)], r"image 1: "),
        ([picture(), torch.zeros(3, 4, 4)], r"image 1 is a Tensor; give a path"),
    ):
        with pytest.raises(UserError, match=message):
            model.embed(given)
    with pytest.raises(UserError, match="nose is no read-out"):
        model.embed(picture(), pooling="nose")


def test_vectors_that_are_not_finite_are_refused_by_name(tmp_path):
    model = nestling.load(write_run(tmp_path / "run", "vit"))
    model.backbone.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match=r"cls holds NaN or infinity for image 0, image 1"):
        model.embed([picture(), picture(1)])


def test_a_run_a_checkpoint_and_a_weights_file_load_and_a_size_that_cannot_be_is_refused(tmp_path):
    run = write_run(tmp_path / "run", "xcit")
    checkpoint = next((run / "checkpoints").iterdir())
    backbone, _ = load_backbone(checkpoint, "student")
    student = nestling.load(checkpoint, network="student", size=32, crop_ratio=1.0)
    assert (student.size, student.crop_ratio, student.trained.network) == (32, 1.0, "student")
    assert student.preprocess(picture()).shape == (3, 32, 32)
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, student.backbone.state_dict()[name])
    save_file(backbones.create("vit_tiny_p16", depth=1).state_dict(), tmp_path / "vit.safetensors")
    assert nestling.load(tmp_path / "vit.safetensors").embed(picture()).shape == (1, 192)
    with pytest.raises(UserError, match=r"size=50: .*multiple"):
        nestling.load(tmp_path / "vit.safetensors", size=50)


def test_embedding_leaves_a_backbone_in_training_as_it_was(model):
    before = model.embed(picture())
    state = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.backbone.train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert np.array_equal(model.embed(picture()), before)
    assert torch.equal(torch.rand(2), expected)
    assert all(part.training for part in model.backbone.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.backbone.state_dict().items())
    model.backbone.eval()
    assert model.to("cpu") is model


def test_as_a_module_it_trains_within_others(model):
    images = torch.randn(2, 3, 64, 96)
    classifier = nn.Sequential(model.vectors("cls+mean_patch"), nn.Linear(2 * model.dim, 5))
    classifier.requires_grad_(True)
    classifier(images).sum().backward()
    assert all(p.grad is not None for name, p in classifier.named_parameters() if "mask_token" not in name)
    classifier.requires_grad_(False)
    maps = model.maps()(images)
    assert [tuple(level.shape[-2:]) for level in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]
