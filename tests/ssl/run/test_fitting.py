"""Which batch fits: the search, and steps that really take memory."""

import pytest
import torch

from nestling.ssl import allocator
from nestling.ssl.run import memory
from nestling.ssl.run.fitting import MARGIN, OnCpu, OnCuda, fitting_on, largest, taken
from nestling.ssl.run.guards import ONE_VALUE

MEGABYTE = 2**20


class Taking:
    """A step that fills so many megabytes, and so many more per image."""

    image_bytes, waiting, reserved = 0, 0, 0

    def __init__(self, constant: int, per_image: int, device: str = "cpu") -> None:
        self.constant, self.per_image, self.device = constant, per_image, device
        self.tried: list[int] = []

    def __call__(self, batch_size: int) -> None:
        self.tried.append(batch_size)
        amount = (self.constant + self.per_image * batch_size) * MEGABYTE
        torch.ones(amount, dtype=torch.uint8, device=self.device)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 45, 64, 1000])
def test_the_largest_that_fits_is_found_in_few_tries(most):
    for truth in [*range(70), 999, 2000]:
        tried = []
        found = largest(
            lambda number, truth=truth, tried=tried: tried.append(number) or number <= truth, most
        )
        allowed = [number for number in range(1, most + 1) if number < 8 or number % 8 == 0]
        assert found == max((number for number in allowed if number <= truth), default=0)
        assert len(tried) == len(set(tried)) <= 2 * max(truth, most, 2).bit_length()
        assert all(number <= most for number in tried)


def test_on_the_cpu_small_steps_foretell_the_largest_that_fits_and_none_is_tried_beyond():
    fitting, step = OnCpu(room=800 * MEGABYTE), Taking(constant=20, per_image=40)
    fitting.begin(step)
    found = largest(fitting.fits, 10_000)
    assert found == 16, "(0.9 x 800 - 20) / 40 is 17.5"
    assert step.tried == [1, 2, 4], "a growth of 800 / 16 MB tells enough"
    memory.forget_peak()
    step(found)
    assert memory.status("VmHWM") <= fitting.limit + MARGIN * fitting.room


def test_memory_that_was_freed_before_is_not_counted_as_taken():
    allocator.keep_freed()
    torch.ones(400 * MEGABYTE, dtype=torch.uint8)
    fitting = OnCpu(room=800 * MEGABYTE)
    fitting.begin(Taking(constant=20, per_image=40))
    assert largest(fitting.fits, 100) == 16, "(0.9 x 800 - 20) / 40 is 17.5"


def test_what_a_run_holds_besides_its_steps_leaves_less_to_them():
    fitting, step = OnCpu(room=800 * MEGABYTE), Taking(constant=20, per_image=40)
    step.reserved, step.image_bytes, step.waiting = 100 * MEGABYTE, MEGABYTE, 20
    fitting.begin(step)
    assert largest(fitting.fits, 100) == 8, "(0.9 x 800 - 20 - 100) / 60 is 10"


def test_a_step_out_of_memory_does_not_fit_and_other_errors_stay_errors():
    assert taken(Taking(0, 1), 1)
    assert not taken(Taking(2**40, 1), 1)

    def single_value(batch_size):
        raise ValueError(f"{ONE_VALUE} when training")

    def mistaken(batch_size):
        raise ValueError("wrong")

    assert taken(single_value, 1)
    with pytest.raises(ValueError, match="wrong"):
        taken(mistaken, 1)


def test_a_device_that_is_neither_is_refused():
    with pytest.raises(ValueError, match="mps can't be tried safely; give a number"):
        fitting_on(torch.device("mps"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_largest_that_succeeds_beside_the_share_held_back_is_found():
    fitting = OnCuda(torch.device("cuda", 0))
    free, total = (amount / MEGABYTE for amount in torch.cuda.mem_get_info(0))
    per_image = max(int(free) // 100, 1)
    fitting.begin(Taking(0, per_image, "cuda:0"))
    assert largest(fitting.fits, 1000) == pytest.approx((free - MARGIN * total) / per_image, abs=9)
