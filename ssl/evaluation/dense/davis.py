"""Video object segmentation in the folders of DAVIS 2017: track the objects of the first frame.

Shapes used below: H x W pixels of a frame, K labels, an h x w grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Data
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.alone import fitting_size, read_ahead
from nestling.ssl.evaluation.dense.folder import read_text
from nestling.ssl.evaluation.dense.grids import enlarged, token_maps
from nestling.ssl.evaluation.dense.masks import IGNORED, read_mask, resized_ids, write_mask
from nestling.ssl.evaluation.dense.propagation import propagate
from nestling.ssl.evaluation.dense.settings import Propagation
from nestling.ssl.evaluation.dense.video_scores import contour_accuracy, region_similarity
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.names import printable
from nestling.ssl.views.evaluation import resized
from nestling.ssl.views.render import normalize

STEP = 64  # of the longer side, as DINO rounds it down


@dataclass(frozen=True)
class Video:
    """Frames in order and the masks of those that have one; the first has."""

    name: str
    frames: list[Path]
    masks: dict[str, Path]


@dataclass(frozen=True)
class ObjectScore:
    """One object of a video: J and F of every frame that counts."""

    video: str
    number: int
    regions: list[float]
    contours: list[float]


def find_videos(folder: Path, split: str, resolution: str) -> list[Video]:
    """The videos that ImageSets/SPLIT.txt lists.

    Raises:
        UserError: the list, frames or a first mask are missing, or a name is no name of a folder.
    """
    listed = folder / "ImageSets" / f"{split}.txt"
    if not listed.is_file():
        raise UserError(f"folder={printable(folder)}: there is no list of videos {printable(listed)}")
    names = read_text(listed).split()
    if not names:
        raise UserError(f"{printable(listed)} lists no video")
    for name in names:
        if name in (".", "..") or "/" in name or "\\" in name:  # masks are saved in a folder of that name
            raise UserError(
                f"{printable(listed)}: {printable(name)} is no name of a video; give its folder's alone"
            )
    return [_video(folder, resolution, name) for name in names]


def _video(folder: Path, resolution: str, name: str) -> Video:
    frames = sorted((folder / "JPEGImages" / resolution / name).glob("*.jpg"))
    masks = {path.stem: path for path in (folder / "Annotations" / resolution / name).glob("*.png")}
    if not frames:
        place = printable(folder / "JPEGImages" / resolution / name)
        raise UserError(f"the video {printable(name)} has no frames: {place} holds no .jpg")
    if frames[0].stem not in masks:
        missing = folder / "Annotations" / resolution / name / f"{frames[0].stem}.png"
        raise UserError(f"the video {printable(name)} has no mask of its first frame, {printable(missing)}")
    return Video(name, frames, masks)


class Tracker:
    """Follows the objects of first frames by the patches of a frozen backbone.

    The shorter side of a frame becomes `size`, the longer one a multiple of 64, both what the backbone takes.
    """

    def __init__(
        self, backbone: Backbone, data: Data, size: int, settings: Propagation, device: torch.device
    ) -> None:
        self.backbone, self.size, self.settings, self.device = backbone, size, settings, device
        self._decoder, self._statistics = Decoder.of(data), normalisation(data)

    def track(self, video: Video) -> Iterator[np.ndarray]:
        """The ids of every frame, those of the first as given.

        Shape:
            -> (H, W) uint8 each

        Raises:
            UserError: a frame can't be read, or its mask has another size.
        """
        given = read_mask(video.masks[video.frames[0].stem])
        images = self._images(video)
        first = next(images)
        if given.shape != first.shape[:2]:
            raise UserError(
                f"the mask of the first frame of {printable(video.name)} has {given.shape[1]} x "
                f"{given.shape[0]} pixels and the frame {first.shape[1]} x {first.shape[0]}"
            )
        maps = self._maps(first)
        labels = one_hot(given, (maps.shape[1], maps.shape[2])).to(self.device)
        yield given
        following = chain([maps], map(self._maps, images))
        for found in propagate(following, labels, self.settings):
            yield sharpened(found, self._shape(*given.shape), (given.shape[0], given.shape[1]))

    def _images(self, video: Video) -> Iterator[np.ndarray]:
        for image in read_ahead(self._decoder.file, [str(path) for path in video.frames]):
            if isinstance(image, UnreadableError):
                raise UserError(f"{image}; a video needs all of its frames")
            yield image

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """DINO's: the longer side in proportion, rounded down to a multiple of 64."""
        longer = max(STEP, self.size * max(height, width) // min(height, width) // STEP * STEP)
        high, wide = (longer, self.size) if height > width else (self.size, longer)
        return fitting_size(self.backbone, high, wide)

    def _maps(self, image: np.ndarray) -> Tensor:
        """Shape: (H, W, C) uint8 -> (D, h, w)."""
        smaller = resized(image, *self._shape(image.shape[0], image.shape[1]))
        pixels = torch.from_numpy(np.array(smaller)).permute(2, 0, 1)[None].to(self.device)
        with torch.no_grad():
            return token_maps(self.backbone, normalize(pixels, *self._statistics))[0]


def one_hot(ids: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """The label of each patch, the one at its centre; what is ignored is background.

    Shape:
        (H, W) uint8 -> (K, h, w) float32, K the largest id + 1
    """
    known = np.where(ids == IGNORED, 0, ids)
    labels = torch.from_numpy(resized_ids(known, *grid).astype(np.int64))
    return torch.nn.functional.one_hot(labels, int(known.max()) + 1).permute(2, 0, 1).float()


def sharpened(labels: Tensor, shown: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """Soft labels of patches -> the id of each pixel.

    As DINO does: enlarged to the frame that the backbone saw, each label stretched to 0 to 1, the largest
    taken, and its ids brought to the size of the video.

    Shape:
        (K, h, w) -> (*size) uint8
    """
    pixels = enlarged(labels[None], shown)[0]
    lowest, highest = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    stretched = torch.where(highest > 0, (pixels - lowest) / (highest - lowest).clamp(min=1e-12), pixels)
    return resized_ids(stretched.argmax(0).cpu().numpy().astype(np.uint8), *size)


def judge_video(tracker: Tracker, video: Video, out: Path) -> list[ObjectScore]:
    """Track one video, save its masks as out/VIDEO/FRAME.png, and score each object.

    The first and the last frame do not count, as in the DAVIS toolkit, nor do frames without a mask; with
    none left there are no scores.
    """
    (out / video.name).mkdir(parents=True, exist_ok=True)
    first = video.masks[video.frames[0].stem]
    given = read_mask(first)
    palette = palette_of(first)
    scores = [ObjectScore(video.name, number, [], []) for number in objects(given)]
    last = len(video.frames) - 1
    with untouched(tracker.backbone):
        tracker.backbone.eval()
        for index, (frame, ids) in enumerate(zip(video.frames, tracker.track(video), strict=True)):
            write_mask(out / video.name / f"{frame.stem}.png", ids, palette)
            if 0 < index < last and frame.stem in video.masks:
                truth = read_mask(video.masks[frame.stem])
                if truth.shape != ids.shape:
                    path = printable(video.masks[frame.stem])
                    raise UserError(f"the mask {path} has another size than the first one of its video")
                known = truth != IGNORED
                for score in scores:
                    pair = (ids == score.number) & known, (truth == score.number) & known
                    score.regions.append(region_similarity(*pair))
                    score.contours.append(contour_accuracy(*pair))
    return [score for score in scores if score.regions]


def objects(ids: np.ndarray) -> list[int]:
    """The ids of a first frame but background and ignored."""
    return [int(number) for number in np.unique(ids) if number not in (0, IGNORED)]


def palette_of(path: Path) -> list[int]:
    """Colours of a palette PNG; of a gray one those of PASCAL VOC, which DAVIS uses.

    The three lowest bits of an id say whether red, green and blue get their highest bit, and so on.
    """
    with Image.open(path) as image:
        found = image.getpalette()
    if found:
        return found
    colours = np.zeros((256, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (np.arange(256) >> (3 * bit + channel) & 1) << (7 - bit)
    return [int(value) for value in colours.ravel()]


def summary(scores: list[ObjectScore]) -> dict[str, float]:
    """J and F as DAVIS reports them: means over objects of means over frames; recall: shares above 0.5."""
    results: dict[str, float] = {}
    for name, frames in (
        ("j", [score.regions for score in scores]),
        ("f", [score.contours for score in scores]),
    ):
        results[f"{name}_mean"] = float(np.mean([np.mean(values) for values in frames]))
        results[f"{name}_recall"] = float(np.mean([np.mean(np.array(values) > 0.5) for values in frames]))
    return {"jf_mean": (results["j_mean"] + results["f_mean"]) / 2, **results}
