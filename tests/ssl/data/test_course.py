"""The course of a run whose global batch changes: its images, epochs and schedules."""

from dataclasses import astuple, replace
from itertools import pairwise, product

import numpy as np
import pytest

from nestling.ssl.config import Config, Optim, Teacher, Train
from nestling.ssl.data.course import Course, Place
from nestling.ssl.data.order import SampleRef, StepSampler, epoch_order
from nestling.ssl.schedules import Schedules

EPOCHS = 3
SIZES = [*product((23, 40), ((4, 6), (6, 4), (3, 16), (16, 3), (5, 5), (7, 1)))]


def walked(length: int, batches: list[int]) -> list[tuple[int, int, int, int]]:
    """The places of a run, one step after the other: step s takes batches[s] images, the last ever after."""
    places = [(0, 0, 0, 0)]
    while True:
        step, epoch, seen, images_seen = places[-1]
        batch = batches[min(step, len(batches) - 1)]
        if length - seen < batch:  # larger than those before
            epoch, seen = epoch + 1, 0
            places[-1] = (step, epoch, seen, images_seen)
        if epoch == EPOCHS:
            return places
        ends = length - seen - batch < batch
        place = (epoch + 1, 0) if ends else (epoch, seen + batch)
        places.append((step + 1, *place, images_seen + batch))


def changed(course: Course, *changes: tuple[int, int]) -> list[Course]:
    """The courses of a run that goes on with another batch at each of the given steps."""
    courses = [course]
    for step, batch in changes:
        last = courses[-1]
        start = last.at(step) if step > last.start.step else last.start  # without a step nothing is saved
        courses.append(replace(last, global_batch=batch, start=start))
    return courses


def images_of(courses: list[Course]) -> list[SampleRef]:
    """What one process is given by the runs along the courses, each up to where the next one begins."""
    ends = [course.start.step for course in courses[1:]] + [courses[-1].num_steps]
    refs: list[SampleRef] = []
    for course, end in zip(courses, ends, strict=True):
        cfg = Config()
        cfg.train.batch_size, cfg.data.epoch_images = course.global_batch, course.epoch_images
        sampler = StepSampler(course.num_images, cfg, end, 0, 1, start_step=course.start.step, course=course)
        refs += [ref for micro_batch in sampler for ref in micro_batch]
    return refs


def assert_passes_are_begun_in_order(refs: list[SampleRef], num_images: int, largest: int) -> None:
    """Every pass gives the first images of its order, each once, and all but less than a batch of them."""
    for number in range(EPOCHS):
        given = [ref.image for ref in refs if ref.pass_ == number]
        assert given == epoch_order(num_images, 0, number)[: len(given)].tolist()
        assert num_images - len(given) < largest
    assert {ref.pass_ for ref in refs} == set(range(EPOCHS))


@pytest.mark.parametrize(("num_images", "batches"), SIZES)
def test_after_a_change_at_any_step_an_epoch_gives_what_it_has_not_given_yet(num_images, batches):
    course = Course(num_images, batches[0], EPOCHS)
    for stop in range(course.num_steps + 1):
        refs = images_of(changed(course, (stop, batches[1])))
        assert_passes_are_begun_in_order(refs, num_images, max(batches))
        steps = [ref.step for ref in refs]
        assert steps == sorted(steps)
        assert set(steps) == set(range(steps[-1] + 1)), "steps are counted on"


def test_a_second_change_goes_on_from_the_first():
    for first, more in product(range(12), range(8)):
        courses = changed(Course(23, 6, EPOCHS), (min(first, 9), 4))
        second = min(courses[1].start.step + more, courses[1].num_steps)
        courses = changed(courses[0], (courses[1].start.step, 4), (second, 5))
        assert_passes_are_begun_in_order(images_of(courses), 23, 6)


@pytest.mark.parametrize("epoch_images", [None, 31])
@pytest.mark.parametrize("batches", [(6, 4, 5), (3, 16, 2), (9, 1, 9)])
def test_places_are_those_of_a_walk_step_by_step(epoch_images, batches):
    course = Course(23, batches[0], EPOCHS, epoch_images)
    for first, more in product(range(4), range(6)):
        courses = changed(course, (first, batches[1]))
        second = min(first + more, courses[1].num_steps)
        courses = changed(course, (first, batches[1]), (second, batches[2]))
        expected = walked(
            epoch_images or 23, [batches[0]] * first + [batches[1]] * (second - first) + [batches[2]]
        )
        last = courses[-1]
        assert last.num_steps == len(expected) - 1
        for step in range(last.start.step, last.num_steps + 1):
            assert astuple(last.at(step)) == expected[step], (first, second, step)
            assert last.ends_epoch(step) == (expected[step][2] == 0)


@pytest.mark.parametrize("batches", [(6, 4), (4, 6), (3, 20)])
def test_a_changed_run_of_declared_epochs_goes_on_in_the_stream_of_passes(batches):
    course = Course(10, batches[0], EPOCHS, epoch_images=27)
    stream = [(image, number) for number in range(9) for image in epoch_order(10, 0, number).tolist()]
    for stop in range(course.num_steps + 1):
        refs = images_of(changed(course, (stop, batches[1])))
        assert [(ref.image, ref.pass_) for ref in refs] == stream[: len(refs)]
        assert abs(len(refs) - EPOCHS * 27) < EPOCHS * max(batches) + batches[1]


@pytest.mark.parametrize("epoch_images", [None, 31])
@pytest.mark.parametrize("before", [None, (2, 7)], ids=["unchanged", "changed before"])
def test_going_on_without_a_change_is_the_same_course(epoch_images, before):
    course = Course(23, 5, EPOCHS, epoch_images)
    if before is not None:
        course = changed(course, before)[-1]
    for stop in range(course.start.step, course.num_steps + 1):
        again = replace(course, start=course.at(stop))
        assert again.num_steps == course.num_steps
        for step in range(stop, course.num_steps + 3):
            assert again.at(step) == course.at(step)
            assert again.position_at(step) == course.position_at(step)
            assert again.slice_at(step) == course.slice_at(step)


def test_a_run_at_one_batch_counts_in_whole_steps():
    course = Course(23, 5, EPOCHS)
    assert (course.steps_per_epoch, course.num_steps) == (4, 12)
    for step in range(12):
        assert course.position_at(step) == step
        assert course.epoch_at(step) == step / 4
        assert course.at(step) == Place(step, step // 4, step % 4 * 5, step * 5)
        assert all(course.passes(step + 1, every) == ((step + 1) % every == 0) for every in (1, 2, 3, 4, 9))


def test_what_comes_every_epoch_or_part_of_one_still_does_after_a_change():
    for stop in range(1, 12):
        first, second = changed(Course(40, 3, EPOCHS), (stop, 7))
        steps = range(second.start.step + 1, second.num_steps + 1)
        whole = second.steps_per_epoch
        assert all(second.passes(step, whole) == second.ends_epoch(step) for step in steps)
        places = [second.epoch_at(step) for step in steps if second.passes(step, 2)]
        assert np.all(np.diff([first.epoch_at(stop), *places]) < 4.5 / whole), (
            "two steps, more where an epoch is cut"
        )


def test_an_epoch_that_is_cut_short_at_the_start_ends_there_once():
    for batches, stop in product(((4, 12), (3, 16), (4, 30), (2, 3)), range(1, 12)):
        course = Course(40, batches[0], EPOCHS)
        after = changed(course, (stop, batches[1]))[-1]
        rest, whole = 40 - after.start.seen_in_epoch, after.steps_per_epoch
        cut = bool(after.start.seen_in_epoch) and rest < batches[1]
        assert after.left_over == (rest if cut else 0)
        assert after.passes(stop, whole) == cut, "no other start is an end by itself"
        assert replace(course, start=course.at(stop)).left_over == 0


def schedules(course: Course) -> Schedules:
    config = Config(
        train=Train(epochs=EPOCHS),
        optim=Optim(lr=1e-3, lr_end=1e-5, lr_scaling="none", warmup_epochs=1, weight_decay_end=0.4),
        teacher=Teacher(temperature_start=0.04, temperature=0.07, temperature_warmup_epochs=2),
    )
    config.head.freeze_epochs = 1
    return Schedules(config, course)


@pytest.mark.parametrize("batches", [(8, 3), (8, 20), (20, 8), (5, 51)])
def test_schedules_go_on_by_images_seen_within_a_step_of_the_unchanged_run(batches):
    course, coarser = Course(203, batches[0], EPOCHS), Course(203, max(batches), EPOCHS)
    old, names = schedules(course), ("lr", "weight_decay", "momentum", "temperature")
    steps = [schedules(coarser).at(step) for step in range(coarser.num_steps + 1)]
    jump = {n: max(abs(getattr(a, n) - getattr(b, n)) for a, b in pairwise(steps)) for n in names}
    for stop in range(0, course.num_steps, 4):
        after = changed(course, (stop, batches[1]))[-1]
        new = schedules(after)
        for step in range(stop, after.num_steps):
            place = after.at(step)
            same = place.epoch * course.steps_per_epoch + place.seen_in_epoch // batches[0]
            left, right, values = old.at(same), old.at(same + 1), new.at(step)
            for name in names:
                low, high = sorted((getattr(left, name), getattr(right, name)))
                room = jump[name] * (1 + (name == "lr"))  # whose warm-up gives a step what its end is due
                assert low - room <= getattr(values, name) <= high + room, (stop, step, name)
            assert values.lr <= new.peak_lr
            assert values.last_layer_frozen == (place.epoch == 0)
