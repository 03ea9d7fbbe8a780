"""One vector per image for retrieval: images keep their shape, and several scales may be averaged.

Shapes used below: D channels of a read-out, H x W pixels.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Data
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import Failure, UnreadableError
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.sources.folder import EXTENSIONS
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.alone import fitting_size, read_ahead
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.readouts import last_blocks, readout
from nestling.ssl.evaluation.retrieval.ground_truth import GroundTruth, image_path
from nestling.ssl.evaluation.retrieval.ranking import evaluate
from nestling.ssl.names import printable
from nestling.ssl.views.evaluation import resized
from nestling.ssl.views.render import normalize

SCALES = (1.0, 1 / math.sqrt(2), 0.5)  # DINO's, where several are asked for
Box = tuple[float, float, float, float]


class Describer:
    """An image to its vector of length 1: the mean of the read-out over the scales, normalised.

    The longer side becomes at most `size`, small images stay; sides that the backbone can't take become the
    nearest that it can.
    """

    def __init__(
        self,
        backbone: Backbone,
        data: Data,
        size: int,
        pooling: str,
        scales: Sequence[float],
        device: torch.device,
    ) -> None:
        self.backbone, self.size, self.scales, self.device = backbone, size, scales, device
        self._readout, self._statistics = readout(pooling), normalisation(data)

    def __call__(self, image: np.ndarray) -> Tensor:
        """Shape: (H, W, C) uint8 -> (D,) float32."""
        height, width = image.shape[:2]
        shrink = min(1.0, self.size / max(height, width))
        high, wide = max(1, round(height * shrink)), max(1, round(width * shrink))
        smaller = resized(image, *fitting_size(self.backbone, high, wide))
        pixels = torch.from_numpy(np.array(smaller)).permute(2, 0, 1)[None].to(self.device)
        pixels = normalize(pixels, *self._statistics)
        with torch.no_grad():
            vectors = [self._at(pixels, round(high * scale), round(wide * scale)) for scale in self.scales]
        return F.normalize(torch.stack(vectors).mean(0), dim=0).cpu()

    def _at(self, pixels: Tensor, height: int, width: int) -> Tensor:
        size = fitting_size(self.backbone, max(1, height), max(1, width))
        if size != pixels.shape[2:]:
            pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False)
        return self._readout(last_blocks(self.backbone, pixels, [self._readout]))[0]


def judge_retrieval(
    truth: GroundTruth, folder: Path, data: Data, describer: Describer, crop_queries: bool, ledger: Ledger
) -> dict[str, float | None]:
    """Search for each query among all images; unreadable ones are left out and entered in `ledger`.

    Raises:
        UserError: too many can't be read, a query's box lies outside its image, or features are not finite.
    """
    decoder = Decoder.of(data)
    boxes: list[Box | None] = [query.box if crop_queries else None for query in truth.queries]
    names = [*truth.images, *(query.name for query in truth.queries)]
    paths = [image_path(folder, name, sorted(EXTENSIONS)) for name in names]
    whole: list[Box | None] = [None] * len(truth.images)
    vectors: dict[int, Tensor] = {}
    failures: list[Failure] = []
    with untouched(describer.backbone):
        describer.backbone.eval()
        for index, image in enumerate(read_ahead(decoder.file, paths)):
            if isinstance(image, UnreadableError):
                failures.append(Failure(index, image.path, image.reason))
                ledger.refuse_above(len(failures), f", such as {failures[-1]}")
                continue
            box = (whole + boxes)[index]
            vectors[index] = describer(image if box is None else cropped(image, box, paths[index]))
            if not vectors[index].isfinite().all():
                raise UserError(
                    f"the features of {printable(paths[index])} are not finite; is the backbone sound?"
                )
    ledger.exchange(failures)
    count, width = len(truth.images), len(next(iter(vectors.values())))
    lost = [index for index in range(count) if index not in vectors]
    database = torch.stack([vectors.get(index, torch.zeros(width)) for index in range(count)])
    readable = [number for number in range(len(truth.queries)) if count + number in vectors]
    if not readable:
        raise UserError(f"none of the {len(truth.queries)} queries in {printable(folder)} can be read")
    asked = torch.stack([vectors[count + number] for number in readable])
    similarities = (asked.double() @ database.double().T).numpy()
    return evaluate(similarities, [truth.queries[number] for number in readable], lost)


def cropped(image: np.ndarray, box: Box, path: str) -> np.ndarray:
    """The part of an image in a box, whose sides are rounded.

    Shape:
        (H, W, C) -> (h, w, C)
    """
    left, top, right, bottom = (max(0, round(side)) for side in box)
    part = image[top:bottom, left:right]
    if not part.size:
        size = f"{image.shape[1]} x {image.shape[0]}"
        raise UserError(f"the box {box} of the query {printable(path)} is not in its image of {size} pixels")
    return part
