"""Class folders that hold one of each thing that users' folders hold, with what becomes of it.

python tests/awkward_images.py FOLDER [--classes N] [--seed N]
"""

import argparse
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tifffile
from image_folder import texture
from PIL import Image

SIDE = 32  # pixels of most images
ORIENTATION = 0x0112
PLAIN = 8  # textures in each class besides the awkward images


@dataclass
class Awkward:
    """What was written, for `data.mode: rgb` and the other defaults.

    `passed_over` are entries that a scan leaves out: what lies in a hidden or foreign folder, links that
    lead nowhere or to a folder or image already there, and files of other kinds.
    """

    root: Path
    classes: list[str]
    readable: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)  # with a word of the reason
    passed_over: list[Path] = field(default_factory=list)


def write_awkward_folder(root: Path, classes: int = 2, seed: int = 0) -> Awkward:
    """Write root/CLASS/…; the same arguments give the same bytes."""
    written = Awkward(root, [f"class_{kind}" for kind in range(classes)])
    random = np.random.default_rng(seed)
    for kind, name in enumerate(written.classes):
        (root / name).mkdir(parents=True)
        for index in range(PLAIN):
            path = root / name / f"plain_{index}.png"
            Image.fromarray(texture(kind, SIDE, random)).save(path)
            written.readable.append(path)
    for number, (file, write) in enumerate(READABLE.items()):
        path = _path(written, number, file)
        write(path, texture(number % classes, SIDE, random))
        written.readable.append(path)
    undecodable = os.fsencode(root / written.classes[0]) + b"/\xff\xfe.png"
    try:
        _save(Path(os.fsdecode(undecodable)), texture(0, SIDE, random))
        written.readable.append(Path(os.fsdecode(undecodable)))
    except OSError:  # a file system that takes only UTF-8, as on a Mac
        pass
    for number, (file, (write, reason)) in enumerate(UNREADABLE.items()):
        path = _path(written, number, file)
        write(path, texture(number % classes, SIDE, random))
        written.unreadable[path] = reason
    _write_passed_over(written)
    return written


def _path(written: Awkward, number: int, file: str) -> Path:
    return written.root / written.classes[number % len(written.classes)] / file


def _save(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


def _write_rotated(path: Path, pixels: np.ndarray) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(pixels[: SIDE // 2]).save(path, exif=exif, quality=95)


def _write_cmyk(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).convert("CMYK").save(path, quality=95)


def _write_ycck(path: Path, pixels: np.ndarray) -> None:
    """Four planes saved as CMYK, whose Adobe marker then says that three of them are Y, Cb and Cr."""
    ycc = np.asarray(Image.fromarray(255 - pixels).convert("YCbCr"))  # the marker means inks, not light
    no_ink = np.zeros((*ycc.shape[:2], 1), dtype=np.uint8)
    planes = np.concatenate([255 - ycc, no_ink], axis=2)  # Pillow inverts them as Adobe does
    Image.frombytes("CMYK", (SIDE, SIDE), planes.tobytes()).save(path, quality=95)
    content = bytearray(path.read_bytes())
    content[content.index(b"Adobe") + 11] = 2
    path.write_bytes(content)


def _write_palette(path: Path, pixels: np.ndarray) -> None:
    """Every other colour of the palette is transparent to some degree."""
    Image.fromarray(pixels).quantize(64).save(path, transparency=bytes([255, 100] * 32))


def _with_alpha(path: Path, pixels: np.ndarray) -> None:
    image = Image.fromarray(pixels)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(path)


def _write_gray_with_alpha(path: Path, pixels: np.ndarray) -> None:
    image = Image.fromarray(pixels).convert("L")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(path)


def _write_one_bit(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).convert("1").save(path)


def _write_sixteen_bits(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels[..., 1].astype(np.uint16) * 257).save(path)


def _write_float(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels[..., 1].astype(np.float32) / 255).save(path)


def _write_sixteen_bit_colors(path: Path, pixels: np.ndarray) -> None:
    tifffile.imwrite(path, pixels.astype(np.uint16) * 257, photometric="rgb")


def _write_one_pixel(path: Path, pixels: np.ndarray) -> None:
    _save(path, pixels[:1, :1])


def _write_strip(path: Path, pixels: np.ndarray) -> None:
    _save(path, np.resize(pixels[:1], (1, 4000, 3)))


def _write_animation(path: Path, pixels: np.ndarray) -> None:
    frames = [Image.fromarray(frame).quantize(64) for frame in (pixels, 255 - pixels)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def _write_half(path: Path, pixels: np.ndarray) -> None:
    large = np.kron(pixels, np.ones((8, 8, 1), dtype=np.uint8))
    Image.fromarray(large).save(path, quality=95)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _write_nothing(path: Path, pixels: np.ndarray) -> None:
    path.write_bytes(b"")


def _write_text(path: Path, pixels: np.ndarray) -> None:
    path.write_text("Not found: the server could not send this picture.\n", encoding="utf-8")


def _write_huge(path: Path, pixels: np.ndarray) -> None:
    """The header of 40000 x 40000 pixels, and almost none of them."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in parts:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(content)


def _write_planes(path: Path, pixels: np.ndarray) -> None:
    bands = np.concatenate([pixels] * 3, axis=2)[..., :8].transpose(2, 0, 1)
    tifffile.imwrite(path, bands, photometric="minisblack", planarconfig="separate")


def _write_bands(path: Path, pixels: np.ndarray) -> None:
    bands = np.concatenate([pixels] * 2, axis=2)
    tifffile.imwrite(path, bands, photometric="minisblack", planarconfig="contig")


def _write_link_to_failing_file(path: Path, pixels: np.ndarray) -> None:
    """Linux answers a read of the start of a process's memory with an input/output error."""
    path.symlink_to("/proc/self/mem")


def _write_not_finite(path: Path, pixels: np.ndarray) -> None:
    values = pixels[..., 0].astype(np.float32)
    values[3, 4] = np.nan
    Image.fromarray(values).save(path)


Write = Callable[[Path, np.ndarray], None]
READABLE: dict[str, Write] = {
    "photo.jpg": _save,
    "UPPER.JPEG": _save,
    "кот 猫 é.PNG": _save,
    "two\nlines.png": _save,
    "rotated.jpg": _write_rotated,
    "cmyk.jpg": _write_cmyk,
    "ycck.jpg": _write_ycck,
    "palette.png": _write_palette,
    "gray_alpha.png": _write_gray_with_alpha,
    "alpha.png": _with_alpha,
    "one_bit.png": _write_one_bit,
    "sixteen_bits.png": _write_sixteen_bits,
    "float.tif": _write_float,
    "sixteen_bit_colors.tif": _write_sixteen_bit_colors,
    "one_pixel.png": _write_one_pixel,
    "strip.png": _write_strip,
    "animation.gif": _write_animation,
    "picture.webp": _save,
}
UNREADABLE: dict[str, tuple[Write, str]] = {
    "half.jpg": (_write_half, "truncated"),
    "nothing.jpg": (_write_nothing, "empty"),
    "text.jpg": (_write_text, "no image"),
    "huge.png": (_write_huge, "max_pixels"),
    "planes.tif": (_write_planes, "8 channels"),
    "bands.tiff": (_write_bands, "6 channels"),
    "failing.jpg": (_write_link_to_failing_file, "Input/output error"),
    "not_finite.tif": (_write_not_finite, "not finite"),
}


def _write_passed_over(written: Awkward) -> None:
    """What a scan leaves out; the links come last in their folder, so that they are the second to be seen."""
    first, root = written.root / written.classes[0], written.root
    image = texture(0, SIDE, np.random.default_rng(1))
    for folder in (root / ".ipynb_checkpoints", root / "__MACOSX", first / ".thumbnails"):
        folder.mkdir()
        _save(folder / "hidden.png", image)
        written.passed_over.append(folder / "hidden.png")
    _save(first / "._resource.png", image)
    (first / "notes.txt").write_text("not an image\n", encoding="utf-8")
    (first / "zz_broken.png").symlink_to("nowhere.png")
    (first / "zz_loop").symlink_to(root, target_is_directory=True)
    (first / "zz_self.png").symlink_to("zz_self.png")
    (first / "zz_again.png").symlink_to("plain_0.png")
    names = ("._resource.png", "notes.txt", "zz_broken.png", "zz_loop", "zz_self.png", "zz_again.png")
    written.passed_over += [first / name for name in names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write class folders of awkward images.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    written = write_awkward_folder(options.folder, options.classes, options.seed)
    print(f"{len(written.readable)} readable and {len(written.unreadable)} unreadable images")
