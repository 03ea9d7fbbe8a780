"""The few drawing parts that the pictures share: text, frames, panels beside and above each other."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WHITE, INK, GRAY, LIGHT = (255, 255, 255), (34, 34, 34), (110, 110, 110), (225, 225, 225)
RIGHT, WRONG = (0, 158, 115), (213, 94, 0)  # told apart by colour-blind eyes too
SERIES = ((0, 114, 178), (230, 159, 0), (204, 121, 167), (86, 180, 233))
TITLE, BODY, SMALL = 28, 20, 17  # text sizes in pixels

Color = tuple[int, int, int]


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's built-in font."""
    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> int:
    """Pixels that a line of text takes."""
    return int(np.ceil(font(size).getlength(text)))


def shortened(text: str, size: int, width: int) -> str:
    """`text`, cut with an ellipsis where it is wider than `width`."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrapped(text: str, size: int, width: int) -> list[str]:
    """`text` in lines of at most `width` pixels, broken at spaces."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [shortened(line, size, width) for line in lines]


def panel(content: Image.Image, title: str, caption: str) -> Image.Image:
    """`content` under a title and a caption as wide as itself."""
    lines = wrapped(caption, SMALL, content.width)
    top = TITLE + 12 + len(lines) * (SMALL + 6) + 10
    page = Image.new("RGB", (content.width, top + content.height), WHITE)
    draw = ImageDraw.Draw(page)
    draw.text((0, 0), shortened(title, TITLE, content.width), INK, font(TITLE))
    for row, line in enumerate(lines):
        draw.text((0, TITLE + 12 + row * (SMALL + 6)), line, GRAY, font(SMALL))
    page.paste(content, (0, top))
    return page


def beside(images: Sequence[Image.Image], gap: int) -> Image.Image:
    """Images in a row, aligned at the top."""
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    page = Image.new("RGB", (width, max(image.height for image in images)), WHITE)
    left = 0
    for image in images:
        page.paste(image, (left, 0))
        left += image.width + gap
    return page


def stacked(images: Sequence[Image.Image], gap: int) -> Image.Image:
    """Images in a column, aligned at the left."""
    height = sum(image.height for image in images) + gap * (len(images) - 1)
    page = Image.new("RGB", (max(image.width for image in images), height), WHITE)
    top = 0
    for image in images:
        page.paste(image, (0, top))
        top += image.height + gap
    return page


def margin(image: Image.Image, width: int) -> Image.Image:
    """`image` with white all around."""
    page = Image.new("RGB", (image.width + 2 * width, image.height + 2 * width), WHITE)
    page.paste(image, (width, width))
    return page


def tile(image: np.ndarray, side: int, frame: Color | None = None, thickness: int = 5) -> Image.Image:
    """The middle square of `image` (H, W, 3) at that side, framed where a colour is given."""
    picture = Image.fromarray(image)
    short = min(picture.size)
    left, top = (picture.width - short) // 2, (picture.height - short) // 2
    inner = side - (2 * thickness if frame else 0)
    square = picture.resize((inner, inner), Image.Resampling.BICUBIC, (left, top, left + short, top + short))
    if frame is None:
        return square
    page = Image.new("RGB", (side, side), frame)
    page.paste(square, (thickness, thickness))
    return page
