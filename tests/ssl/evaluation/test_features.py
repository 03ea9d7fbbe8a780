"""Features: each image once, in order, and training none the wiser."""

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image

from nestling import backbones
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.loader import EvalBatch
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.baselines import raw_pixels
from nestling.ssl.evaluation.features import extract, gather_rows

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def tiny(drop_path=0.3):
    torch.manual_seed(0)
    return backbones.create("xcit_nano_12_p4", embed_dim=16, depth=2, num_heads=2, drop_path=drop_path)


def pictures(num_images, size=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (num_images, 3, size, size), generator=generator, dtype=torch.uint8)


def batches(images, order, batch_size):
    return [EvalBatch(part, images[part], []) for part in torch.tensor(order).split(batch_size)]


def test_rows_come_in_dataset_order_and_equal_the_plain_forward():
    backbone, images = tiny(), pictures(7)
    found = extract(
        backbone, batches(images, [4, 0, 6, 2, 1, 5, 3], 3), 7, ["mean_patch", "cls"], MEAN, STD, "cpu"
    )
    pixels = (images.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        expected = backbone.double().eval()(pixels)
    assert found.indices.tolist() == list(range(7))
    found = found.vectors
    assert list(found) == ["mean_patch", "cls"]
    torch.testing.assert_close(found["cls"].double(), expected.cls, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["mean_patch"].double(), expected.patches.mean(1), atol=1e-5, rtol=1e-5)
    assert found["cls"].dtype == torch.float32
    assert not found["cls"].requires_grad


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 1, 2, 3], [0, 1, 2, 3, 4]])
def test_an_image_missing_or_seen_twice_or_unknown_is_noticed(order):
    images = pictures(5)
    with pytest.raises(AssertionError):
        extract(tiny(), batches(images, order, 2), 4, ["cls"], MEAN, STD, "cpu")


def test_unreadable_images_have_no_row_and_are_passed_on():
    backbone, images = tiny(), pictures(4)
    whole = extract(backbone, batches(images, range(4), 4), 4, ["cls"], MEAN, STD, "cpu").vectors["cls"]
    failure, nothing = Failure(1, "a.jpg", "is empty"), torch.empty(0, dtype=torch.long)
    rest = torch.tensor([3, 0, 2])
    mine = [EvalBatch(nothing, images[:0], [failure]), EvalBatch(rest, images[rest], [])]
    rows = extract(backbone, mine, 4, ["cls"], MEAN, STD, "cpu")
    assert rows.indices.tolist() == [0, 2, 3]
    assert rows.failures == [failure]
    torch.testing.assert_close(rows.vectors["cls"], whole[[0, 2, 3]], atol=1e-6, rtol=1e-5)
    assert len(raw_pixels(mine, 4, 16).vectors["pixels"]) == 3


def test_autocast_gives_float32_features_close_to_full_precision():
    backbone, images = tiny(), pictures(4)
    full, half = (
        extract(backbone, batches(images, [0, 1, 2, 3], 2), 4, ["cls"], MEAN, STD, "cpu", kind).vectors["cls"]
        for kind in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert 0 < (full - half).abs().max() < 0.2


def test_evaluation_leaves_modes_buffers_and_random_states_as_they_were():
    backbone, images = tiny(), pictures(6)
    backbone.train()
    backbone.blocks[0].eval()  # a mixed state must come back as mixed
    modes = {name: part.training for name, part in backbone.named_modules()}
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)

    def drawing():
        for part in batches(images, range(6), 2):
            torch.rand(3)
            np.random.rand(3)
            random.random()
            torch.set_num_threads(1)
            yield part

    threads = torch.get_num_threads()
    extract(backbone, drawing(), 6, ["cls"], MEAN, STD, "cpu")
    after = torch.rand(1).item(), np.random.rand(), random.random(), torch.get_num_threads()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert after == (torch.rand(1).item(), np.random.rand(), random.random(), threads)
    assert {name: part.training for name, part in backbone.named_modules()} == modes
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_training_after_an_evaluation_equals_training_without():
    def trained(evaluate):
        backbone, images = tiny().train(), pictures(8)
        optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
        torch.manual_seed(3)
        for _ in range(3):
            if evaluate:
                extract(backbone, batches(images, range(8), 3), 8, ["cls"], MEAN, STD, "cpu")
            features = backbone(images.float() / 255)
            optimizer.zero_grad()
            (features.cls.square().mean() + features.patches.mean()).backward()
            optimizer.step()
        return backbone.state_dict()

    with_it, without = trained(True), trained(False)
    for name, value in without.items():
        assert torch.equal(value, with_it[name]), name


def test_an_image_that_cannot_be_read_is_reported_and_modes_come_back():
    def breaking():
        yield from batches(pictures(2), [0], 1)
        raise UserError("a.png is broken")

    backbone = tiny().train()
    with pytest.raises(UserError, match=r"a\.png is broken"):
        extract(backbone, breaking(), 2, ["cls"], MEAN, STD, "cpu")
    assert all(part.training for part in backbone.modules())


def test_one_process_gathers_what_it_has():
    rows = torch.randn(3, 2)
    assert gather_rows(rows, "cpu") is rows


def test_raw_pixels_are_the_pixels():
    images = pictures(5)
    found = raw_pixels(batches(images, [3, 1, 0, 4, 2], 2), 5, 16).vectors["pixels"]
    torch.testing.assert_close(found, images.flatten(1).float() / 255)


def test_raw_pixels_of_large_images_are_shrunk_to_32():
    images = pictures(2, 96)
    found = raw_pixels(batches(images, [1, 0], 1), 2, 96).vectors["pixels"]
    assert found.shape == (2, 3 * 32 * 32)
    for image, row in zip(images, found, strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((32, 32), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(pillow)).permute(2, 0, 1).flatten()
        torch.testing.assert_close(row * 255, expected.float(), rtol=0, atol=1.01)


TWO_PROCESSES = """
    import sys, torch, torch.distributed as dist
    sys.path.insert(0, sys.argv[1])
    import nestling.ssl.evaluation.features as module
    from nestling.ssl.errors import UserError
    from nestling.ssl.evaluation.baselines import raw_pixels
    from test_features import MEAN, STD, batches, pictures, tiny

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2
    module.ROWS = 2  # several rounds
    for share in ([[0, 2, 4, 6], [1, 3, 5]], [[2, 1, 0, 6, 5, 4, 3], []]):
        mine = batches(pictures(7), share[rank], 3) if share[rank] else []
        found = module.extract(tiny(), mine, 7, ["cls", "mean_patch"], MEAN, STD, "cpu")
        pixels = raw_pixels(mine, 7, 16)
        if rank == 0:
            torch.save({**found.vectors, **pixels.vectors}, f"{sys.argv[2]}/{len(share[0])}.pt")
        else:
            assert found.vectors == pixels.vectors == {} and len(found.indices) == 0

    def breaking():
        raise UserError("a.png is broken")
        yield

    try:
        module.extract(tiny(), breaking() if rank else [], 7, ["cls"], MEAN, STD, "cpu")
        raise AssertionError("the error of one process must reach all")
    except UserError as error:
        assert "a.png" in str(error)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_features_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    here = __file__.rpartition("/")[0]
    subprocess.run([*launcher, str(script), here, str(tmp_path)], check=True, timeout=300)
    images = pictures(7)
    expected = extract(
        tiny(), batches(images, range(7), 3), 7, ["cls", "mean_patch"], MEAN, STD, "cpu"
    ).vectors
    for share in (4, 7):
        found = torch.load(tmp_path / f"{share}.pt")
        torch.testing.assert_close(found.pop("pixels"), images.flatten(1).float() / 255)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
