"""Images with their instances from a COCO-style json: `images`, `annotations` and `categories`.

Shapes used below: H, W pixels of an image, C channels, n instances in it.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as rle
from torch import Tensor
from torch.utils.data import Dataset

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import Failure, UnreadableError
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.randomness import Stream, generator

logger = logging.getLogger("nestling")

Ref = tuple[int, int]  # an image by its index, and the epoch it is seen in; JUDGED: as it is, crowds included
JUDGED = -1


class Sample(NamedTuple):
    """An image and its n instances: `boxes` (n, 4) as left, top, right, bottom, `labels` (n,) from 1 on.

    Shape:
        image: (C, H, W) uint8; target: boxes, labels, masks (n, H, W) bool, iscrowd (n,)
    """

    image: Tensor
    target: dict[str, Tensor]


class InstanceBatch(NamedTuple):
    """The readable images of a batch, and what couldn't be read."""

    samples: list[Sample]
    failures: list[Failure]


class CocoInstances(Dataset[InstanceBatch | UserError]):
    """A json of instances; `names` are the categories to number from 1 on, by default its own by their ids.

    Instances of other categories are left out and counted in the log. A batch is made of a list of `Ref`s,
    whichever process makes it: the flip of an image is a function of (seed, epoch, index).

    Raises:
        UserError: the file can't be read or isn't of that form.
    """

    def __init__(
        self,
        file: str,
        images: str | None,
        decoder: Decoder,
        names: Sequence[str] | None = None,
        flip: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.file, self.decoder, self.flip, self.seed = Path(file).expanduser(), decoder, flip, seed
        self.folder = self.file.parent if images is None else Path(images).expanduser()
        content = self._read()
        try:
            by_id = {item["id"]: str(item["name"]) for item in content["categories"]}
            self.names = [by_id[number] for number in sorted(by_id)] if names is None else list(names)
            self.images = [
                (str(item["file_name"]), int(item["height"]), int(item["width"]))
                for item in content["images"]
            ]
            place = {item["id"]: index for index, item in enumerate(content["images"])}
            label = {name: number for number, name in enumerate(self.names, start=1)}
            self.instances: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in self.images]
            unknown = 0
            for item in content["annotations"]:
                number = label.get(by_id[item["category_id"]], 0)
                unknown += not number
                if number and min(item["bbox"][2:]) > 0:  # a box without area can't be learned
                    index = place[item["image_id"]]
                    if not is_drawn(item.get("segmentation"), *self.images[index][1:]):
                        raise self._undrawn(item)
                    self.instances[index].append((number, item))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{printable(self.file)} is no COCO-style json of instances ({error!r})"
            ) from error
        if unknown:
            logger.warning(f"{printable(self.file)}: {unknown} instances of categories unknown to training")
        if not any(self.instances):
            raise UserError(f"{printable(self.file)} holds no instance of {', '.join(self.names[:5])}")

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{printable(self.file)} can't be read as json: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{printable(self.file)} is no COCO-style json of instances: it holds no object")
        return content

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> str:
        """The file of an image."""
        return str(self.folder / self.images[index][0])

    def __getitem__(self, refs: list[Ref]) -> InstanceBatch | UserError:
        samples: list[Sample] = []
        failures: list[Failure] = []
        for index, epoch in refs:
            try:
                samples.append(self.sample(index, epoch))
            except UnreadableError as problem:
                failures.append(Failure(index, problem.path, problem.reason))
            except UserError as error:  # returned, as an exception would come back wrapped in a traceback
                return error
        return InstanceBatch(samples, failures)

    def sample(self, index: int, epoch: int = JUDGED) -> Sample:
        """One image; in training without the instances that stand for a crowd.

        Raises:
            UnreadableError: it can't be decoded.
            UserError: it has another size than the json says, or an instance has no mask.
        """
        _, height, width = self.images[index]
        image = self.decoder.file(self.path(index))
        if image.shape[:2] != (height, width):
            found = " x ".join(map(str, image.shape[:2]))
            raise UserError(
                f"{printable(self.path(index))} has {found} pixels (height x width), but "
                f"{printable(self.file)} says {height} x {width}"
            )
        used = [(n, item) for n, item in self.instances[index] if epoch == JUDGED or not item.get("iscrowd")]
        boxes = torch.tensor([item["bbox"] for _, item in used], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = np.zeros((len(used), height, width), dtype=bool)
        for mask, (_, item) in zip(masks, used, strict=True):
            mask[:] = self._mask(item, height, width)
        target = {
            "boxes": boxes,
            "labels": torch.tensor([number for number, _ in used], dtype=torch.long),
            "masks": torch.from_numpy(masks),
            "iscrowd": torch.tensor([int(bool(item.get("iscrowd"))) for _, item in used], dtype=torch.long),
        }
        pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if epoch != JUDGED and generator(self.seed, Stream.VIEWS, epoch, index).random() < self.flip:
            pixels, target = flipped(pixels, target)
        return Sample(pixels, target)

    def _mask(self, item: dict[str, Any], height: int, width: int) -> np.ndarray:
        """Polygons, or a run-length code. Shape: (H, W) bool."""
        drawn = item.get("segmentation")
        try:
            if isinstance(drawn, list):
                code = rle.merge(rle.frPyObjects(drawn, height, width))
            else:
                listed = isinstance(drawn["counts"], list)  # type: ignore[index]
                code = rle.frPyObjects(drawn, height, width) if listed else drawn
            mask: np.ndarray = rle.decode(code).astype(bool)
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise self._undrawn(item) from error
        return mask

    def _undrawn(self, item: dict[str, Any]) -> UserError:
        return UserError(
            f"{printable(self.file)}: instance {item.get('id')} has no segmentation that can be drawn "
            "(polygons of three points or more, or a run-length code of the image's size); Mask R-CNN "
            "learns from masks"
        )


def is_drawn(segmentation: object, height: int, width: int) -> bool:
    """Whether it has the form of polygons, or of a run-length code of an image of that size."""
    if isinstance(segmentation, list):
        return bool(segmentation) and all(
            isinstance(part, list)
            and len(part) >= 6
            and len(part) % 2 == 0
            and {*map(type, part)} <= {int, float}
            for part in segmentation
        )
    if not isinstance(segmentation, dict) or segmentation.get("size") != [height, width]:
        return False
    counts = segmentation.get("counts")
    if isinstance(counts, list):
        return {*map(type, counts)} == {int} and min(counts) >= 0 and sum(counts) == height * width
    return isinstance(counts, str) and counts != ""


def flipped(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Left becomes right. Shape: as in `Sample`."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}
