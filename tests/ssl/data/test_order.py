import numpy as np
import pytest

from nestling.ssl.config import Config
from nestling.ssl.data.order import StepSampler, epoch_order, steps_per_epoch
from nestling.ssl.errors import UserError


def config(batch_size, accumulation=1):
    cfg = Config()
    cfg.train.batch_size, cfg.train.accumulation = batch_size, accumulation
    return cfg


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
        assert {ref.epoch for ref in refs} == {epoch}
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
