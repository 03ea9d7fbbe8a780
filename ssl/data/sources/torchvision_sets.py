"""The data sets of torchvision by name, from files that are already there: nothing is downloaded."""

import difflib
import inspect
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.decoding.reach import may_recover
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.cache import cache_folder
from nestling.ssl.data.sources.packed import PackedPaths
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

TRAIN_SPLITS = ("train", "trainval", "train-standard")
VAL_SPLITS = ("val", "test", "valid")
EMNIST = "EMNIST"  # hides `train` and `download` in its **kwargs
FILES = ("samples", "imgs", "_samples", "_image_files", "_images", "images")  # where sets keep their paths
LABELS = ("targets", "labels", "_labels", "y")
CLASSES = ("classes", "categories")
REFUSED_SPLIT = "Unknown value"  # so begins what torchvision says
ABSENT = ("not found", "not present", "corrupt", "no such file")


class TorchvisionSet(ImageSource):
    """`torchvision:FashionMNIST` and the like, below `root`, else the folder torchvision of the cache.

    `split` "train" or "val" is said as the set's constructor asks: by `train`, `split` or `image_set`; a
    set without "val" is judged by its "test", else its "valid"; EMNIST's own splits are ways to merge
    classes, of which "byclass" has all images, so that one is read. Where it keeps paths, the files are read
    as those of a folder; else its own images are. Labels are those that it knows without opening images.

    Raises:
        UserError: the set is unknown, not there, has no such split or no images.
    """

    def __init__(
        self,
        name: str,
        split: str,
        decoder: Decoder,
        key: str = "data.train",
        root: str | None = None,
        cache: str | None = None,
    ) -> None:
        self._split, self._decoder = split, decoder
        self._said = f"{key}={printable(f'torchvision:{name}')}"
        folder = cache_folder(cache) / "torchvision" if root is None else os.path.expanduser(root)
        self._root = os.path.abspath(folder)
        self._set_name = _known(name, self._said)
        self.name = f"torchvision:{self._set_name}"
        self._keywords: dict[str, Any] = {}
        dataset = self._first_that_opens()
        self._count = len(dataset)
        if not self._count:
            raise UserError(f"{self._said} holds no images in {printable(self._root)}")
        files = _files(dataset)
        self._files = None if files is None else PackedPaths(files)
        self._dataset = dataset if files is None else None
        self.labels, self.class_names = _labels(dataset)
        if files is None:
            self._check_kind(dataset)

    def __len__(self) -> int:
        return self._count

    def path(self, index: int) -> str:
        """The file where the set has one per image, else the set, the split and the number."""
        index = range(len(self))[index]
        return self._files[index] if self._files is not None else f"{self.name}/{self._split}/{index}"

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        """From its file where the set has one; else what the set itself decodes, which is never reduced."""
        path = self.path(index)
        if self._files is not None:
            return self._decoder.file(path, reduction)
        if self._dataset is None:
            self._dataset = self._opened(self._keywords)
        try:
            image = _image_of(self._dataset[index])
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableError(path, reason, transient=may_recover(error)) from error
        except Exception as error:  # sets decode images in ways of their own
            raise UnreadableError(path, " ".join(str(error).split()) or type(error).__name__) from error
        if isinstance(image, Image.Image):
            return self._decoder.image(image, path)
        return self._decoder.array(np.asarray(image), path)

    def sides(self, indices: np.ndarray) -> np.ndarray | None:
        if self._files is None:
            return None
        sizes = [self._decoder.size(self._files[index]) for index in indices.tolist()]
        return np.array([0 if size is None else min(size) for size in sizes], dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Without the pixels: a spawned process opens the set itself."""
        return {**self.__dict__, "_dataset": None}

    def _first_that_opens(self) -> Any:
        """The set by the first way to say the split that it takes."""
        refusal = ""
        for keywords in self._ways():
            try:
                dataset = self._opened(keywords)
            except Exception as error:  # of damaged files, sets raise anything
                if not (isinstance(error, ValueError) and str(error).startswith(REFUSED_SPLIT)):
                    raise self._not_opened(error, keywords) from error
                refusal = str(error)
            else:
                self._keywords = keywords
                return dataset
        raise UserError(f"{self._said}: the set has no split for data.{self._split}: {refusal}")

    def _ways(self) -> Iterator[dict[str, Any]]:
        """What to tell the constructor beside the root, the preferred first."""
        if self._set_name == EMNIST:
            yield {"split": "byclass", "train": self._split == "train"}
            return
        parameters = _parameters(self._set_name)
        splits = TRAIN_SPLITS if self._split == "train" else VAL_SPLITS
        chooser = next((name for name in ("train", "split", "image_set") if name in parameters), None)
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and name not in ("root", chooser)
        ]
        if needed:
            raise UserError(
                f"{self._said} needs {', '.join(needed)} besides its name, which can't be given here; "
                "name a folder or a list of its images"
            )
        if chooser is None and self._split == "val":
            raise UserError(
                f"{self._said} has no part for validation; leave data.val null to hold out part of data.train"
            )
        if chooser is None:
            yield {}
        elif chooser == "train":
            yield {"train": self._split == "train"}
        else:
            for name in splits:
                yield {chooser: name}

    def _opened(self, keywords: dict[str, Any]) -> Any:
        from torchvision import datasets

        parameters = _parameters(self._set_name)
        common: dict[str, Any] = {"root": self._root, "download": False}  # two sets download by default
        common = {name: value for name, value in common.items() if name in parameters}
        return getattr(datasets, self._set_name)(**common, **keywords)

    def _not_opened(self, error: Exception, keywords: dict[str, Any]) -> UserError:
        """Say whether the files are missing, and if so how to get them."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) or not any(word in reason.lower() for word in ABSENT):
            return UserError(f"{self._said} can't be opened in data.root={printable(self._root)}: {reason}")
        said = f"{self._said} is not in data.root={printable(self._root)}, or damaged there"
        if "download" not in _parameters(self._set_name) and self._set_name != EMNIST:
            return UserError(f"{said} ({reason}); put its files there as torchvision's page on it says")
        given = {"root": self._root, **keywords, "download": True}
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in given.items())
        code = f"import torchvision; torchvision.datasets.{self._set_name}({arguments})"
        return UserError(f"{said}; download it by: python -c {shlex.quote(code)}")

    def _check_kind(self, dataset: Any) -> None:
        try:
            item = _image_of(dataset[0])
        except Exception:  # an unreadable first image is for load to name
            return
        if not isinstance(item, Image.Image | np.ndarray):
            raise UserError(f"{self._said} holds no images but {type(item).__name__}; name another set")


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _image_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _known(name: str, said: str) -> str:
    """The set's name as torchvision spells it, in whatever case it was written."""
    from torchvision import datasets

    names = [known for known in datasets.__all__ if inspect.isclass(getattr(datasets, known))]
    by_lower = {known.lower(): known for known in names}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(by_lower[found] for found in close)}?" if close else "see its page"
    raise UserError(f"{said}: torchvision has no data set of that name; {advice}")


def _parameters(set_name: str) -> dict[str, inspect.Parameter]:
    from torchvision import datasets

    return dict(inspect.signature(getattr(datasets, set_name)).parameters)


def _files(dataset: Any) -> list[str] | None:
    """The path of each image, where the set keeps them: alone, or each with a label."""
    for attribute in FILES:
        entries = getattr(dataset, attribute, None)
        if isinstance(entries, list) and len(entries) == len(dataset):
            first = _image_of(entries[0])
            if isinstance(first, str | os.PathLike) and os.path.isfile(first):
                return [os.path.abspath(_image_of(entry)) for entry in entries]
    return None


def _labels(dataset: Any) -> tuple[np.ndarray | None, list[str] | None]:
    """One label per image and the classes' names, where every image has a number; none is opened."""
    values = next((found for name in LABELS if (found := getattr(dataset, name, None)) is not None), None)
    if values is None:
        entries: list[Any] = next(filter(None, (getattr(dataset, name, None) for name in FILES)), [])
        values = [entry[1] for entry in entries if isinstance(entry, tuple) and len(entry) == 2]
    try:
        labels = np.asarray(values)
    except ValueError:  # lists of different lengths
        return None, None
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iu" or labels.min() < 0:
        return None, None
    return labels.astype(np.int64), _class_names(dataset, int(labels.max()) + 1)


def _class_names(dataset: Any, count: int) -> list[str]:
    """A distinct name per class; the numbers where the set has none."""
    found = next((names for name in CLASSES if (names := getattr(dataset, name, None))), None)
    if found is None:
        numbers: dict[str, int] = getattr(dataset, "class_to_idx", {})
        found = sorted(numbers, key=numbers.__getitem__)
    names = [", ".join(name) if isinstance(name, tuple) else str(name) for name in found]
    if len(names) < count:
        return [str(label) for label in range(count)]
    counts = Counter(names)
    return [f"{name} ({label})" if counts[name] > 1 else name for label, name in enumerate(names)]
