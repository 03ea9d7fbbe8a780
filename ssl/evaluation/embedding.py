"""A trained backbone from Python: images of any kind in, vectors out, read and cut as its run did.

Shapes used below: n images, B of a batch, C channels, S pixels of a side, D features.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nestling.backbones import Backbone
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.extraction.forward import Forward, refuse_not_finite
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.readouts import last_blocks, readout
from nestling.ssl.run.loading import check_size
from nestling.ssl.trained import Trained, load_trained
from nestling.ssl.views.evaluation import Centre
from nestling.ssl.views.render import normalize

Picture = str | os.PathLike[str] | Image.Image | np.ndarray


class Embedder:
    """A backbone with its preprocessing: `nestling.load(PATH)` gives one.

    `backbone` is a plain module in evaluation mode whose parameters want no gradient; `dim` is the width of
    its class token, `size` the side of the square that it sees of every image.

    Raises:
        UserError: the backbone can't take images of that size.
    """

    def __init__(self, trained: Trained, size: int | None = None, crop_ratio: float | None = None) -> None:
        if size is not None and size < 1:
            raise UserError(f"size={size}: images have at least one pixel")
        data = trained.config.data
        self.trained, self.backbone = trained, trained.backbone
        self.dim: int = trained.backbone.embed_dim
        self.size = size or trained.size
        self.crop_ratio = crop_ratio or trained.config.knn.crop_ratio
        check_size(self.backbone, self.size, "size")
        self.mean, self.std = normalisation(data)
        self.device = torch.device("cpu")
        self._decoder = Decoder.of(data)
        self._view = Centre((self.size, self.size), self.crop_ratio)

    def to(self, device: torch.device | str) -> "Embedder":
        """Compute there from now on; returns itself."""
        self.device = torch.device(device)
        self.backbone.to(self.device)
        return self

    def read(self, image: Picture, name: str = "the image") -> np.ndarray:
        """The whole image upright, in the run's channels; `name` is for messages about one that is no file.

        Shape:
            a path, a PIL image, or an array (H, W), (H, W, C) or (C, H, W) -> (H, W, C) uint8

        Raises:
            UserError: it can't be read or is of no such kind.
        """
        if isinstance(image, np.ndarray):
            return self._decoder.array(image, name)
        if isinstance(image, Image.Image):
            return self._decoder.image(image, name)
        if isinstance(image, str | os.PathLike):
            return self._decoder.file(str(Path(image).expanduser()))
        found = type(image).__name__
        raise UserError(f"{name} is a {found}; give a path, a PIL image or a NumPy array, or a list of them")

    def preprocess(self, image: Picture) -> Tensor:
        """The image as the backbone takes it: read, its middle square cut out, normalised; on the CPU.

        Shape:
            as `read` takes it -> (C, S, S) float32
        """
        return normalize(self._pixels(image, "the image")[None], self.mean, self.std)[0]

    def embed(
        self, images: Picture | Iterable[Picture], pooling: str = "cls", batch_size: int = 64
    ) -> np.ndarray:
        """A vector per image, in the order given; one image alone gives one row too.

        An array of four dimensions is a batch of images. `pooling` names a read-out: cls, mean_patch,
        cls+mean_patch, or one of the last blocks such as last4:cls+mean_patch. Only `batch_size` images are
        held at once, so `images` may be a generator over very many. The backbone stays as it is.

        Shape:
            n images -> (n, D) float32

        Raises:
            UserError: an image can't be read, with its path or place; an unknown pooling; vectors with NaN; a
                batch without images.
        """
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: a batch holds at least one image")
        with untouched(self.backbone):
            self.backbone.eval()
            forward = Forward(self.trained, [pooling], self.size, device=self.device)
            found: list[np.ndarray] = []
            for names, pixels in self._batches(images, batch_size):
                rows = forward(pixels)
                refuse_not_finite(rows, names)
                found.append(rows[pooling])
            return np.concatenate(found) if found else np.empty((0, *forward.shapes[pooling]), np.float32)

    def vectors(self, pooling: str = "cls") -> "Vectors":
        """The backbone as a module that gives one vector per image, for `nn.Sequential` and the like."""
        return Vectors(self.backbone, pooling)

    def maps(self) -> "Maps":
        """The backbone as a module that gives feature maps at strides 4, 8, 16 and 32."""
        return Maps(self.backbone)

    def _batches(
        self, images: Picture | Iterable[Picture], batch_size: int
    ) -> Iterator[tuple[list[str], Tensor]]:
        is_one = isinstance(images, str | os.PathLike | Image.Image) or not isinstance(images, Iterable)
        is_one |= isinstance(images, np.ndarray) and images.ndim < 4
        places = enumerate([images] if is_one else images)  # type: ignore[arg-type]
        while batch := list(islice(places, batch_size)):
            names = [_name(image, f"image {place}") for place, image in batch]  # type: ignore[arg-type]
            pixels = [self._pixels(image, name) for (_, image), name in zip(batch, names, strict=True)]  # type: ignore[arg-type]
            yield names, torch.stack(pixels)

    def _pixels(self, image: Picture, name: str) -> Tensor:
        """Shape: -> (C, S, S) uint8"""
        return torch.from_numpy(self._view(self.read(image, name), 0))


class Vectors(nn.Module):
    """A backbone as other libraries have them: normalised images in, one vector per image out.

    Shape:
        (B, C, H, W) -> (B, D)
    """

    def __init__(self, backbone: Backbone, pooling: str = "cls") -> None:
        super().__init__()
        self.backbone, self._readout = backbone, readout(pooling)

    def forward(self, images: Tensor) -> Tensor:
        return self._readout(last_blocks(self.backbone, images, [self._readout]))


class Maps(nn.Module):
    """A backbone as detectors and segmentation heads take it.

    Shape:
        (B, C, H, W) -> four of (B, D_i, ceil(H / s_i), ceil(W / s_i)), s = 4, 8, 16, 32
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.backbone.pyramid(images)


def load(
    path: str | os.PathLike[str],
    network: str = "teacher",
    *,
    size: int | None = None,
    crop_ratio: float | None = None,
    device: torch.device | str = "cpu",
) -> Embedder:
    """The backbone of a run directory, of one of its checkpoints, or of a weights file, ready to embed.

    `size` and `crop_ratio` are those that the run was judged at where nothing else is said.

    Raises:
        UserError: nothing is there, it is damaged, or it can't take images of that size.
    """
    return Embedder(load_trained(Path(path), network), size, crop_ratio).to(device)


def _name(image: Picture, place: str) -> str:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else place
