"""A run of a tiny backbone, and small data sets as dense evaluations, retrieval and copy detection take them.

python tests/dense_subjects.py FOLDER
"""

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Views

NAME, OPTIONS = "xcit_nano_12_p4", {"embed_dim": 16, "depth": 2, "num_heads": 2}
PALETTE = [0, 0, 0, 200, 0, 0, 0, 200, 0]
COLOURS = np.array([[40, 60, 90], [220, 70, 60], [70, 200, 90]], np.uint8)


def tiny_backbone(seed: int = 0) -> backbones.Backbone:
    torch.manual_seed(seed)
    return backbones.create(NAME, **OPTIONS).eval().requires_grad_(False)


def write_tiny_run(run: Path) -> Path:
    """One checkpoint, as pretraining leaves it, that names images which are not there. Returns `run`."""
    folder = run / "checkpoints/step_00000007"
    folder.mkdir(parents=True)
    state = tiny_backbone().state_dict()
    save_file({f"backbone.{key}": value for key, value in state.items()}, folder / "teacher.safetensors")
    config = Config(
        data=Data(train=str(run / "images"), num_workers=0),
        backbone=Backbone(NAME, 0.1, OPTIONS),
        views=Views(global_size=[32]),
    )
    write(config, folder / "config.yaml")
    return run


def scene(seed: int, height: int = 40, width: int = 56) -> tuple[np.ndarray, np.ndarray]:
    """A rectangle of class 1 and one of class 2 before class 0, noisy, and a corner that is ignored."""
    random = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    for number, left in ((1, 4), (2, 32)):
        top = 4 * int(random.integers(1, 4))
        mask[top : top + 20, left : left + 16] = number
    image = np.clip(COLOURS[mask] + random.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)
    mask[:4, :4] = 255
    return image, mask


def write_scenes(root: Path, count: int = 4, seed: int = 0) -> Path:
    """root/images/NN/0000.png and root/masks/NN/0000.png; returns root."""
    for index in range(count):
        image, mask = scene(seed * 1000 + index)
        for part, pixels in (("images", image), ("masks", mask)):
            folder = root / part / f"{index % 2:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{index:04d}.png")
    return root


def noisy(ids: np.ndarray, seed: int, strength: float = 6) -> np.ndarray:
    """The colours of ids, with noise: (H, W, 3) uint8."""
    noise = np.random.default_rng(seed).normal(0, strength, (*ids.shape, 3))
    return np.clip(COLOURS[ids] + noise, 0, 255).astype(np.uint8)


def write_video(root: Path) -> Path:
    """DAVIS' folders with one video, of two squares that move towards each other; returns root."""
    for part in ("JPEGImages/480p/squares", "Annotations/480p/squares", "ImageSets/2017"):
        (root / part).mkdir(parents=True)
    (root / "ImageSets/2017/val.txt").write_text("squares\n")
    for index in range(5):
        ids = np.zeros((64, 128), np.uint8)
        ids[12:36, 8 + 4 * index : 36 + 4 * index] = 1
        ids[32:56, 92 - 4 * index : 120 - 4 * index] = 2
        frame = Image.fromarray(noisy(ids, index, 4))
        frame.save(root / f"JPEGImages/480p/squares/{index:05d}.jpg", quality=95)
        mask = Image.fromarray(ids)
        mask.putpalette(PALETTE)
        mask.save(root / f"Annotations/480p/squares/{index:05d}.png")
    return root


def write_landmarks(root: Path, each: int = 4) -> Path:
    """gnd_made.pkl and jpg/: images of one colour; a query shows it in its box alone. Returns root."""
    (root / "jpg/more").mkdir(parents=True)
    names, queries, entries = [], [], []
    for kind in range(len(COLOURS)):
        for index in range(each):
            name = f"more/{kind}_{index}" if index else f"{kind}_{index}.png"
            ids = np.full((40 - 4 * index, 40), kind)
            file = root / "jpg" / (f"{name}.jpg" if index else name)
            Image.fromarray(noisy(ids, 10 * kind + index, 9)).save(file)
            names.append(name)
        ids = np.full((80, 80), (kind + 1) % len(COLOURS))
        ids[10:50, 20:60] = kind
        Image.fromarray(noisy(ids, 100 + kind, 9)).save(root / f"jpg/q{kind}.jpg", quality=95)
        queries.append(f"q{kind}")
        ours = [kind * each + index for index in range(each)]
        box = [20.2, 10.0, 59.8, 50]
        entries.append({"easy": np.array(ours[:2]), "hard": ours[2:], "junk": [], "bbx": box})
    content = {"imlist": names, "qimlist": queries, "gnd": entries}
    (root / "gnd_made.pkl").write_bytes(pickle.dumps(content, 2))
    return root


def write_copies(root: Path) -> Path:
    """root/copydays with originals, recompressed ones and pairs that don't belong; root/others, root/more."""
    for part in ("copydays/original", "copydays/jpegqual/30", "copydays/strong", "others", "more"):
        (root / part).mkdir(parents=True)
    pictures = [picture(number) for number in range(6)]
    for number, image in enumerate(pictures):
        image.save(root / f"copydays/original/{2000 + number}00.png")
        image.save(root / f"copydays/jpegqual/30/{2000 + number}01.jpg", quality=30)
        pictures[(number + 1) % 6].save(root / f"copydays/strong/{2000 + number}02.png")
    for number in range(5):
        picture(100 + number).save(root / f"others/{number}.png")
    for number in range(40):
        picture(200 + number).save(root / f"more/{number}.png")
    return root


def picture(seed: int) -> Image.Image:
    """Four colours that run into each other."""
    corners = np.random.default_rng(seed).integers(0, 256, (2, 2, 3)).astype(np.uint8)
    return Image.fromarray(corners).resize((44, 36), Image.Resampling.BILINEAR)


def write_all(root: Path) -> Path:
    """All of the above under the names that the docs use; returns root."""
    write_scenes(root / "scenes/train")
    write_scenes(root / "scenes/val", count=2, seed=1)
    write_video(root / "DAVIS")
    write_landmarks(root / "roxford5k")
    return write_copies(root)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
