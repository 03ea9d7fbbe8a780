"""How far a run is: which images a step takes, where an epoch ends, how many steps are left.

A run may go on with another global batch, in mid-epoch too. So its place is told in epochs and images,
and steps are only counted: nobody else may multiply a step with a batch or divide it by an epoch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a run stands between two steps.

    Args:
        step: finished steps.
        epoch: finished epochs.
        seen_in_epoch: images that the epoch under way has taken already.
        images_seen: images taken in all epochs.
    """

    step: int = 0
    epoch: int = 0
    seen_in_epoch: int = 0
    images_seen: int = 0


@dataclass(frozen=True)
class Course:
    """The steps of a run from `start` on, each of `global_batch` images.

    An epoch ends where the rest of it doesn't fill a step. It is a pass through all images, or as many
    images of endless passes as `epoch_images` declares. Whatever `start` and the batches before it, no
    pass gives an image twice.
    """

    num_images: int
    global_batch: int
    epochs: int
    epoch_images: int | None = None
    start: Place = Place()

    @property
    def steps_per_epoch(self) -> int:
        """Of a whole epoch at this batch."""
        return self._epoch_length // self.global_batch

    @property
    def num_steps(self) -> int:
        """All steps of the run, those before `start` included."""
        whole = self.epochs - self.start.epoch - 1
        return self.start.step + self._first_steps + whole * self.steps_per_epoch

    @property
    def _epoch_length(self) -> int:
        return self.num_images if self.epoch_images is None else self.epoch_images

    @property
    def _first_steps(self) -> int:
        """What is left of the epoch at `start`, in steps; 0 where that doesn't fill one."""
        return (self._epoch_length - self.start.seen_in_epoch) // self.global_batch

    @property
    def left_over(self) -> int:
        """Images that the epoch at `start` still had, where they fill no step: it is over there; else 0."""
        rest = self._epoch_length - self.start.seen_in_epoch
        return rest if self.start.seen_in_epoch and rest < self.global_batch else 0

    def at(self, step: int) -> Place:
        """Where the run stands after `step` finished steps, at least those of `start`."""
        start, done = self.start, step - self.start.step
        assert done >= 0, f"step {step} lies before the start {start}"
        epoch, seen = start.epoch, start.seen_in_epoch + done * self.global_batch
        if done >= self._first_steps:
            epochs, within = divmod(done - self._first_steps, self.steps_per_epoch)
            epoch, seen = start.epoch + 1 + epochs, within * self.global_batch
        return Place(step, epoch, seen, start.images_seen + done * self.global_batch)

    def ends_epoch(self, finished: int) -> bool:
        """Whether an epoch is over after `finished` steps."""
        return self.at(finished).seen_in_epoch == 0

    def epoch_at(self, step: int) -> float:
        """Finished epochs and the share of the one under way."""
        return self.position_at(step) / self.steps_per_epoch

    def position_at(self, step: int) -> float:
        """Where schedules stand: steps of this batch that would have led there; `step` if all were of it."""
        return self._position_in_images(self.at(step)) / self.global_batch

    def passes(self, finished: int, interval: int) -> bool:
        """Whether what ended last reached a multiple of `interval` in steps of this batch.

        That is a step, or at `start` the epoch that has images left over.
        """
        images, after = interval * self.global_batch, self._position_in_images(self.at(finished))
        if finished > self.start.step:
            before = self._position_in_images(self.at(finished - 1))
        else:  # smaller batches may have gone beyond the whole steps of this one
            before = min(self._position_in_images(self.start), after - bool(self.left_over))
        return after // images > before // images

    def _position_in_images(self, place: Place) -> int:
        # Whole numbers as long as possible, so that an unchanged run gets its steps back exactly.
        return place.epoch * self.steps_per_epoch * self.global_batch + place.seen_in_epoch

    def slice_at(self, step: int) -> tuple[int, int]:
        """The pass in whose order the images of a step begin, and where in it."""
        place = self.at(step)
        if self.epoch_images is None:
            return place.epoch, place.seen_in_epoch
        return divmod(place.images_seen, self.num_images)
