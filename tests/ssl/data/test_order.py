import numpy as np
import pytest

from nestling.ssl.config import Config
from nestling.ssl.data.order import StepSampler, epoch_order, steps_per_epoch
from nestling.ssl.errors import UserError


def config(batch_size, accumulation=1, epoch_images=None, shuffle_shards=16):
    cfg = Config()
    cfg.train.batch_size, cfg.train.accumulation = batch_size, accumulation
    cfg.data.epoch_images, cfg.data.shuffle_shards = epoch_images, shuffle_shards
    return cfg


def shard_ends(sizes):
    return np.cumsum(sizes, dtype=np.int64)


def test_an_order_is_a_permutation_of_seed_and_epoch_alone():
    orders = [epoch_order(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(np.array_equal(np.sort(order), np.arange(100)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 4
    assert np.array_equal(epoch_order(100, 1, 1), orders[3])
    assert orders[0].dtype == np.int64


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "processes"), [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
)
def test_a_step_sees_the_same_images_however_its_batch_is_shared_out(batch_size, accumulation, processes):
    cfg = config(batch_size, accumulation)
    seen = {}
    for process in range(processes):
        for refs in StepSampler(22, cfg, 12, process, processes):
            assert len(refs) == batch_size
            seen.setdefault(refs[0].step, []).extend(refs)
    assert sorted(seen) == list(range(12))
    for step, refs in seen.items():
        epoch, within = divmod(step, 5)
        assert {ref.pass_ for ref in refs} == {epoch}
        expected = epoch_order(22, 0, epoch)[4 * within : 4 * within + 4]
        assert sorted(ref.image for ref in refs) == sorted(expected)


def test_micro_batches_of_processes_are_consecutive_parts_of_the_global_batch():
    parts = {
        (micro, process): [ref.image for ref in refs]
        for process in range(3)
        for micro, refs in enumerate(StepSampler(30, config(2, accumulation=2), 1, process, 3))
    }
    joined = [image for micro in range(2) for process in range(3) for image in parts[micro, process]]
    assert joined == epoch_order(30, 0, 0)[:12].tolist()


def test_a_later_start_gives_the_tail():
    cfg = config(3)
    whole = list(StepSampler(10, cfg, 9, 0, 1))
    assert list(StepSampler(10, cfg, 9, 0, 1, start_step=4)) == whole[4:]
    assert len(StepSampler(10, cfg, 9, 0, 1, start_step=4)) == 5
    assert list(StepSampler(10, cfg, 9, 0, 1, start_step=9)) == []


def test_images_that_an_epoch_leaves_over_come_in_another():
    sampler = StepSampler(10, config(4), 2 * 8, 0, 1)
    assert set(range(10)) == {ref.image for refs in sampler for ref in refs}


def test_too_few_images_name_all_that_multiplies():
    assert steps_per_epoch(12, config(4), 3) == 1
    with pytest.raises(UserError, match=r"10 .*batch_size=4 .*accumulation=1 .*3 processes.*at most 3"):
        steps_per_epoch(10, config(4), 3)
    with pytest.raises(UserError, match="more images or fewer processes"):
        StepSampler(1, config(1), 10, 0, 2)


@pytest.mark.parametrize("epoch_images", [8, 10, 27])
def test_declared_epochs_are_slices_of_one_stream_of_passes(epoch_images):
    stream = np.concatenate([epoch_order(10, 0, number) for number in range(6)])
    refs = [ref for refs in StepSampler(10, config(4, epoch_images=epoch_images), 13, 0, 1) for ref in refs]
    assert [ref.image for ref in refs] == stream[:52].tolist()
    assert [ref.pass_ for ref in refs] == [place // 10 for place in range(52)]
    assert [ref.step for ref in refs] == [place // 4 for place in range(52)]


def test_no_view_is_repeated_in_a_declared_epoch_longer_than_a_pass():
    cfg = config(5, epoch_images=35)
    refs = [ref for refs in StepSampler(10, cfg, steps_per_epoch(10, cfg, 1), 0, 1) for ref in refs]
    assert len({(ref.image, ref.pass_) for ref in refs}) == len(refs) == 35


def test_a_declared_epoch_decides_the_steps_alone():
    assert steps_per_epoch(10, config(4, epoch_images=8), 1) == 2
    assert steps_per_epoch(10, config(4, epoch_images=1000), 1) == 250
    assert (
        steps_per_epoch(3, config(4, epoch_images=8), 1) == 2
    )  # a step may hold an image twice, by other views
    with pytest.raises(
        UserError, match=r"data.epoch_images=7 .*batch_size=4 .*2 processes: lower .*at most 3"
    ):
        steps_per_epoch(1000, config(4, epoch_images=7), 2)
    with pytest.raises(UserError, match=r"raise data\.epoch_images or use fewer processes"):
        steps_per_epoch(1000, config(4, epoch_images=1), 2)


def test_a_global_batch_larger_than_a_pass_spans_several():
    sampler = StepSampler(3, config(8, epoch_images=8), 2, 0, 1)
    assert [sampler.global_batch_at(step)[1].tolist() for step in (0, 1)] == [
        [0, 0, 0, 1, 1, 1, 2, 2],
        [2, 3, 3, 3, 4, 4, 4, 5],
    ]


@pytest.mark.parametrize("epoch_images", [None, 7, 40])
@pytest.mark.parametrize("blocks", [None, shard_ends([5, 1, 9, 8])])
def test_a_resume_at_any_step_gives_the_same_rest(epoch_images, blocks):
    cfg = config(2, accumulation=2, epoch_images=epoch_images and 2 * epoch_images, shuffle_shards=2)
    whole = list(StepSampler(23, cfg, 12, 1, 2, blocks=blocks))
    for start in range(13):
        assert list(StepSampler(23, cfg, 12, 1, 2, start, blocks)) == whole[2 * start :]


@pytest.mark.parametrize("blocks", [None, shard_ends([5, 1, 9, 9])])
def test_processes_share_the_passes_out_without_overlap(blocks):
    cfg = config(2, accumulation=3, epoch_images=24, shuffle_shards=2)
    refs = [
        ref for process in range(2) for refs in StepSampler(24, cfg, 6, process, 2, 0, blocks) for ref in refs
    ]
    for number in range(3):
        assert sorted(ref.image for ref in refs if ref.pass_ == number) == list(range(24))


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_at_no_time_more_blocks_are_in_use_than_the_window_says(window):
    ends = shard_ends([7, 1, 12, 3, 9, 5, 8])
    order = epoch_order(45, 3, 1, ends, window)
    assert sorted(order) == list(range(45))
    shard = np.searchsorted(ends, order, side="right")
    spans = [np.flatnonzero(shard == number)[[0, -1]] for number in range(7)]
    in_use = [sum(first <= place <= last for first, last in spans) for place in range(45)]
    assert max(in_use) <= window
    if window > 1:  # mixed they are
        assert max(in_use) > 1


def test_blocks_and_what_is_in_them_are_in_another_order_each_epoch():
    ends = shard_ends([10] * 6)
    orders = [epoch_order(60, 0, epoch, ends, window=1) for epoch in range(2)]
    first, second = (np.searchsorted(ends, order[::10], side="right").tolist() for order in orders)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    inside = [order[order < 10] for order in orders]
    assert not np.array_equal(*inside)
    assert np.array_equal(orders[1], epoch_order(60, 0, 1, ends, window=1))


def test_without_a_window_blocks_change_nothing():
    assert np.array_equal(epoch_order(60, 0, 2, shard_ends([20, 40]), window=0), epoch_order(60, 0, 2))


def test_blocks_that_a_subset_left_empty_are_passed_over():
    ends = np.array([0, 0, 4, 4, 9])
    order = epoch_order(9, 0, 0, ends, window=1)
    assert sorted(order) == list(range(9))
    assert sorted(order[:4]) == [0, 1, 2, 3] or sorted(order[5:]) == [0, 1, 2, 3]
