import multiprocessing

import numpy as np
import pytest
import torch
from image_folder import texture
from PIL import Image

from nestling.ssl.config import Config, Data
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalLoader, TrainLoader
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.evaluation import Centre, eval_view
from nestling.ssl.views.on_device import colored
from nestling.ssl.views.plan import draw, sizes_at
from nestling.ssl.views.render import render


def opened(root):
    return open_source(Data(train=str(root)), "train")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(11):
        pixels = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number:02d}.png")
    return opened(root)


def config(**data):
    cfg = Config(seed=5)
    cfg.train.batch_size = 3
    cfg.views.global_size, cfg.views.local_size, cfg.views.num_local = [16, 24], [8, 12], 3
    for name, value in data.items():
        setattr(cfg.data, name, value)
    return cfg


def batches(source, cfg, steps=5, **place):
    with TrainLoader(
        source, cfg, steps, place.pop("process", 0), place.pop("num_processes", 1), **place
    ) as loader:
        return list(loader)


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        a.step == b.step
        and torch.equal(a.indices, b.indices)
        and all(torch.equal(v, w) for v, w in zip(a.views, b.views, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def test_views_are_grouped_by_size_and_lie_view_after_view(images):
    cfg = config(num_workers=0)
    for batch in batches(images, cfg):
        sizes = sizes_at(cfg.views, 5, batch.step)
        assert [tuple(view.shape) for view in batch.views] == [
            (2 * 3, 3, *[sizes[0]] * 2),
            (3 * 3, 3, *[sizes[1]] * 2),
        ]
        assert all(view.dtype == torch.uint8 for view in batch.views)
        for place, index in enumerate(batch.indices.tolist()):
            image = images.load(index)
            random = generator(5, Stream.VIEWS, batch.step // 3, index)
            for number, view in enumerate(draw(random, *image.shape[:2], cfg.views, *sizes)):
                group, within = (0, number) if number < 2 else (1, number - 2)
                assert np.array_equal(batch.views[group][within * 3 + place], render(view, image))


def test_colours_left_to_the_device_are_those_of_the_loader_whatever_the_workers(images):
    whole, later, elsewhere = (config(num_workers=workers) for workers in (0, 0, 1))
    later.views.color_on = elsewhere.views.color_on = "device"
    for ours, again, theirs in zip(*(batches(images, cfg) for cfg in (later, elsewhere, whole)), strict=True):
        assert theirs.colors is None
        assert same([ours], [again])
        for view, colors, repeated, expected in zip(
            ours.views, ours.colors, again.colors, theirs.views, strict=True
        ):
            assert colors.steps == repeated.steps
            assert torch.equal(colors.views, repeated.views)
            assert torch.equal(colors.numbers, repeated.numbers)
            far = (colored(view, colors) - expected).abs()
            assert far.mean() < 1, "a pixel near the threshold of solarize may be on its other side"


def test_without_local_views_there_is_one_group(images):
    cfg = config(num_workers=0)
    cfg.views.num_local = 0
    assert [len(batch.views) for batch in batches(images, cfg, steps=1)] == [1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 5 worker processes")
@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (5, "fork"), (2, "spawn"), (1, "forkserver")])
def test_views_do_not_depend_on_the_loader_processes(images, workers, method):
    expected = batches(images, config(num_workers=0))
    assert same(batches(images, config(num_workers=workers, start_method=method)), expected)


@pytest.mark.slow
def test_photo_tiles_reach_spawned_workers():
    from nestling.ssl.data.sources.photo_tiles import PhotoTiles

    val = PhotoTiles("val")
    expected = batches(val, config(num_workers=0), steps=2)
    assert same(batches(val, config(num_workers=1, start_method="spawn"), steps=2), expected)


def test_a_later_start_equals_the_tail_of_the_whole_run(images):
    cfg = config(num_workers=0)
    assert same(batches(images, cfg, start_step=2), batches(images, cfg)[2:])


def test_views_of_a_sample_do_not_depend_on_the_number_of_processes(images):
    alone = batches(images, config(num_workers=0), steps=2)
    cfg = config(num_workers=0)
    cfg.train.batch_size = 1
    shared = [batches(images, cfg, steps=2, process=process, num_processes=3) for process in range(3)]
    for step, batch in enumerate(alone):
        parts = [shared[process][step] for process in range(3)]
        assert torch.equal(batch.indices, torch.cat([part.indices for part in parts]))
        for group, view in enumerate(batch.views):
            joined = torch.stack([part.views[group] for part in parts], dim=1).flatten(0, 1)
            assert torch.equal(view, joined)


def test_loading_neither_reads_nor_moves_global_random_states(images):
    torch.manual_seed(1)
    np.random.seed(1)
    first = batches(images, config(num_workers=0))
    after = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    assert (torch.rand(1), np.random.rand()) == after
    assert same(batches(images, config(num_workers=0)), first)


def test_closing_ends_the_loader_processes(images):
    before = set(multiprocessing.active_children())
    loader = TrainLoader(images, config(num_workers=2), 50, 0, 1)
    next(iter(loader))
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    loader.close()
    assert not any(process.is_alive() for process in started)
    assert len(loader) == 50


@pytest.fixture
def with_bad_files(tmp_path):
    """Eight images, of which 03 and 06 are none."""
    for number in range(8):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number:02d}.png")
    for number in (3, 6):
        (tmp_path / f"{number:02d}.png").write_bytes(b"no image")
    return opened(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_where_asked_to_raise_an_unreadable_image_ends_the_iteration_in_one_line(with_bad_files, workers):
    cfg = config(num_workers=workers, on_error="raise")
    with pytest.raises(UserError, match=r"^\S*0[36]\.png: .*data\.on_error=skip") as raised:
        batches(with_bad_files, cfg, steps=4)
    assert "Traceback" not in str(raised.value)
    with pytest.raises(UserError, match=r"^\S*0[36]\.png: "):
        list(EvalLoader(with_bad_files, cfg.data, Centre((8, 8), 1.0), 2, num_workers=workers))


def test_another_image_stands_in_for_an_unreadable_one(with_bad_files):
    for batch in batches(with_bad_files, config(num_workers=0), steps=8):
        bad = [index for index in batch.indices.tolist() if index in (3, 6)]
        assert batch.replaced == len(bad)
        assert {failure.image for failure in batch.failures} >= set(bad)
        assert all(view.float().std() < 20 for view in batch.views)  # every view is of a plain image


@pytest.mark.slow
def test_what_stands_in_depends_on_neither_workers_nor_the_start(with_bad_files):
    plain = batches(with_bad_files, config(num_workers=0), steps=8)
    assert same(batches(with_bad_files, config(num_workers=2), steps=8), plain)
    assert same(batches(with_bad_files, config(num_workers=0), steps=8, start_step=5), plain[5:])


def test_evaluation_leaves_unreadable_images_out(with_bad_files):
    found = list(EvalLoader(with_bad_files, Data(), Centre((8, 8), 1.0), 3))
    assert [batch.indices.tolist() for batch in found] == [[0, 1, 2], [4, 5], [7]]
    assert [len(batch.images) for batch in found] == [3, 2, 1]
    assert [failure.image for batch in found for failure in batch.failures] == [3, 6]


def test_evaluation_ends_as_soon_as_too_many_are_unreadable(with_bad_files):
    loader = iter(EvalLoader(with_bad_files, Data(), Centre((8, 8), 1.0), 3, ledger=Ledger(0.1, 8)))
    assert next(loader).indices.tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"^1 of 8 images can't be read, such as \S*03\.png: .*share=0\.1"):
        next(loader)


def test_too_few_images_are_refused_before_any_work(images):
    cfg = config()
    cfg.train.batch_size = 12
    with pytest.raises(UserError, match="11 training images"):
        TrainLoader(images, cfg, 5, 0, 1)


@pytest.mark.parametrize("processes", [1, 2, 3, 12])
def test_evaluation_sees_each_image_once_over_all_processes(images, processes):
    seen = {}
    for process in range(processes):
        for indices, views, _ in EvalLoader(images, Data(), Centre((12, 12), 0.8), 4, process, processes):
            assert views.shape[1:] == (3, 12, 12)
            for index, view in zip(indices.tolist(), views, strict=True):
                assert index not in seen
                seen[index] = view
    assert sorted(seen) == list(range(11))
    assert all(np.array_equal(seen[i], eval_view(images.load(i), 12, 0.8)) for i in seen)


@pytest.mark.slow
def test_evaluation_with_workers_equals_evaluation_without(images):
    plain = list(EvalLoader(images, Data(), Centre((12, 12), 1.0), 4))
    for method in ("fork", "spawn"):
        shared = list(EvalLoader(images, Data(start_method=method), Centre((12, 12), 1.0), 4, num_workers=2))
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(shared, plain, strict=True)
            for a, b in zip(ours[:2], theirs[:2], strict=True)
        )


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    """Of several sizes, one of them damaged behind its header and one PNG."""
    root = tmp_path_factory.mktemp("jpegs")
    for number in range(8):
        image = Image.fromarray(texture(number, 150, np.random.default_rng(number))[: 100 + 5 * number])
        image.save(root / f"{number}.{'png' if number == 5 else 'jpg'}")
    damaged = (root / "3.jpg").read_bytes()
    (root / "3.jpg").write_bytes(damaged[: len(damaged) // 2])
    return opened(root)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork")])
def test_jpegs_decoded_smaller_give_nearly_the_views_of_whole_ones(jpegs, workers, method):
    """Whatever stands in for the damaged one, whose size was known before, has the boxes of its own size."""
    smaller = batches(jpegs, config(num_workers=workers, start_method=method))
    assert same(smaller, batches(jpegs, config(num_workers=0)))
    whole = batches(jpegs, config(num_workers=0, scaled_decode=False))
    assert not same(smaller, whole)
    assert sum(batch.replaced for batch in smaller) > 0
    for ours, theirs in zip(smaller, whole, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        for views, others in zip(ours.views, theirs.views, strict=True):
            assert (views.float() - others.float()).abs().mean() < 8  # boxes elsewhere: 20 to 30


def test_evaluation_decodes_jpegs_whole(jpegs):
    (batch,) = EvalLoader(jpegs, Data(), Centre((16, 16), 0.875), batch_size=10)
    for index, image in zip(batch.indices.tolist(), batch.images.numpy(), strict=True):
        assert np.array_equal(image, eval_view(jpegs.load(index), 16, 0.875))
        assert min(jpegs.load(index).shape[:2]) >= 100
