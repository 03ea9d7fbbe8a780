"""Batches fetched ahead, on a device that the tests play; on CUDA also on the real one."""

import time

import pytest
import torch

from nestling.ssl.data.loader import Batch
from nestling.ssl.data.prefetch import Prefetched, prefetched
from nestling.ssl.errors import UserError
from nestling.ssl.views.on_device import colors_of


def batch(number: int) -> Batch:
    return Batch([torch.full((2, 3, 4, 4), number, dtype=torch.uint8)], torch.tensor([number]), number, [], 0)


class Device:
    """Copies at once, and is at work for `busy` seconds after each mark."""

    def __init__(self, busy: float = 0.0) -> None:
        self.busy, self.said, self._done = busy, list[str](), 0.0

    def begin(self, batch: Batch) -> Batch:
        self.said.append(f"begin {batch.step}")
        return batch.to(torch.device("cpu"))

    def finish(self, batch: Batch) -> None:
        self.said.append(f"finish {batch.step}")

    def mark(self) -> None:
        self._done = time.perf_counter() + self.busy

    def idle(self) -> float:
        return max(0.0, time.perf_counter() - self._done)


def test_the_next_batch_is_on_its_way_before_it_is_asked_for_and_never_more_than_one():
    device = Device()
    batches = Prefetched(iter([batch(0), batch(1), batch(2)]), device)
    seen = []
    for _ in range(3):
        seen.append(next(batches).step)
        batches.fetch()
        batches.fetch()
    assert seen == [0, 1, 2]
    assert device.said == ["begin 0", "finish 0", "begin 1", "finish 1", "begin 2", "finish 2"]
    with pytest.raises(StopIteration):
        next(batches)


def test_without_fetching_ahead_all_batches_come_too():
    assert [found.step for found in Prefetched(iter([batch(0), batch(1)]), Device())] == [0, 1]


def test_on_the_cpu_nothing_is_taken_early_or_copied():
    made = [batch(0), batch(1)]
    rest = iter(made)
    batches = prefetched(rest, torch.device("cpu"))
    assert next(batches) is made[0]
    assert batches.fetch() == 0.0
    assert next(rest) is made[1]


def test_what_is_wrong_with_a_batch_is_told_where_it_would_be_used():
    def failing():
        yield batch(0)
        raise UserError("no image can be read")

    batches = Prefetched(failing(), Device())
    assert next(batches).step == 0
    batches.fetch()
    with pytest.raises(UserError, match="no image can be read"):
        next(batches)


@pytest.mark.parametrize(("busy", "loads", "least", "most"), [(0.5, 0.02, 0, 0), (0.02, 0.1, 0.05, 0.1)])
def test_only_the_time_in_which_the_device_had_nothing_to_do_was_waited(busy, loads, least, most):
    def slow():
        yield batch(0)
        time.sleep(loads)
        yield batch(1)

    batches = Prefetched(slow(), Device(busy))
    next(batches)
    start = time.perf_counter()
    waited = batches.fetch()
    assert least <= waited <= most + max(0.0, time.perf_counter() - start - loads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_each_batch_arrives_whole_while_the_one_before_is_computed_with():
    """Large enough that a copy read too early, or memory used twice, would show."""
    device = torch.device("cuda")

    def pinned():
        for number in range(20):
            pixels = torch.full((64, 3, 224, 224), number, dtype=torch.uint8)
            yield Batch([pixels], torch.tensor([number]), number, [], 0, [colors_of([])]).pin_memory()

    batches, sums = prefetched(pinned(), device), []
    weights = torch.randn(2048, 2048, device=device)
    for _ in range(20):
        found = next(batches)
        assert found.views[0].device.type == found.colors[0].views.device.type == "cuda"
        for _ in range(20):
            weights = (weights @ weights).tanh()
        sums.append(found.views[0].sum(dtype=torch.int64))
        del found
        assert batches.fetch() >= 0
    assert torch.stack(sums).tolist() == [64 * 3 * 224 * 224 * number for number in range(20)]
