"""Which images k-NN may use, and the classes they belong to.

Shapes used below: N training images, M validation images.
"""

import logging
from collections.abc import Sequence

import numpy as np

from nestling.ssl.data.sources.base import ImageSource, Subset, first_alike
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

log = logging.getLogger("nestling")


def matched_labels(
    train: ImageSource, val: ImageSource, otherwise: str = ""
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Labels of both sides in the numbering of the training set, matched by class name.

    `otherwise` ends the sentence that asks for labels.

    Shape:
        -> train (N,), val (M,) with -1 where training has no such class, the C class names

    Raises:
        UserError: a side has no labels, or no class is on both sides.
    """
    train_labels, train_names = _labels_of(train, "data.train", otherwise)
    val_labels, val_names = _labels_of(val, "data.val", otherwise)
    filled = np.unique(train_labels).tolist()  # filtering can empty a class, for which nothing would vote
    number_of = {train_names[number]: number for number in filled}
    unknown = [name for name in val_names if name not in number_of]
    renumbered = np.array([number_of.get(name, -1) for name in val_names], np.int64)
    labels = renumbered[val_labels]
    if not (labels >= 0).any():
        raise UserError(
            f"no class of data.val={printable(val.name)} ({_some(val_names)}) is in "
            f"data.train={printable(train.name)} ({_some(train_names)}); classes are matched by the names "
            "of their folders"
        )
    if unknown:
        log.warning(
            "left out %d of %d validation images, of %d classes that data.train lacks: %s",
            (labels < 0).sum(),
            len(labels),
            len(unknown),
            _some(unknown),
        )
    return train_labels, labels, train_names


def _labels_of(source: ImageSource, key: str, otherwise: str) -> tuple[np.ndarray, list[str]]:
    if source.labels is None or source.class_names is None:
        raise UserError(
            f"k-NN needs labels and {key}={printable(source.name)} has none: give a folder of class "
            f"folders, each with its images inside{otherwise}"
        )
    return source.labels.astype(np.int64), list(source.class_names)


def refuse_shared_files(train: ImageSource, val: ImageSource) -> None:
    """Raise UserError where a validation image is a training image too: it would find itself.

    Files are told by their names in folders whose links are followed: those of parts of one source by
    their numbers, others by hashes, eight bytes each.
    """
    queries, ours = _told_apart_by(train, val)
    shared = np.flatnonzero(np.isin(ours, queries))
    if len(shared):
        raise UserError(
            f"{len(shared)} files are both in data.train={printable(train.name)} and "
            f"data.val={printable(val.name)}, such as {printable(train.path(int(shared[0])))}; an image "
            "that finds itself says nothing, so keep the two apart"
        )


def shared_files(train: ImageSource, val: ImageSource) -> tuple[np.ndarray, np.ndarray] | None:
    """Numbers that are equal for images of one file, and the same in every process; None: no file is shared.

    Shape:
        -> train (N,), val (M,) int64
    """
    queries, ours = _told_apart_by(train, val)
    if not np.isin(ours, queries).any():
        return None
    numbers = first_alike(np.concatenate([ours, queries]))
    assert numbers is not None
    return numbers[: len(ours)], numbers[len(ours) :]


def unknown_classes(val: ImageSource, labels: np.ndarray) -> dict[str, int]:
    """How many validation images there are of each class that no training image has.

    Shape:
        labels: (M,), of `matched_labels`
    """
    assert val.labels is not None
    assert val.class_names is not None
    numbers, counts = np.unique(val.labels[labels < 0], return_counts=True)
    return {val.class_names[number]: count for number, count in zip(numbers, counts.tolist(), strict=True)}


def _told_apart_by(train: ImageSource, val: ImageSource) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the validation images and of the training images, equal for the same file."""
    if isinstance(train, Subset) and isinstance(val, Subset) and train.source is val.source:
        return val.indices, train.indices
    return _identities(val), _identities(train)


def _identities(source: ImageSource) -> np.ndarray:
    if isinstance(source, Subset):
        return source.source.identities()[source.indices]
    return source.identities()


def _some(names: Sequence[str]) -> str:
    return ", ".join(printable(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
