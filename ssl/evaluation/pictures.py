"""What a network has learned, to look at: nearest neighbours, attention, and the curve of k-NN.

Pillow alone draws them. Shapes used below: H, W pixels; h, w patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from nestling.backbones import Backbone
from nestling.ssl.evaluation import canvas
from nestling.ssl.evaluation.curve import Points, learning_curve
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.views.evaluation import resized
from nestling.ssl.views.render import normalize

# Anchors of a dark-to-bright colour map, evenly spaced: violet, crimson, orange, pale yellow.
HEAT = np.array([[60, 15, 95], [188, 55, 84], [249, 142, 9], [252, 255, 190]], np.float64)
FOCUS = {  # by whether there is a class token: the panel's title and caption
    True: (
        "Where the class token looks",
        "Attention over a whole photograph at several resolutions, mean over heads.",
    ),
    False: (
        "Which patches are most like the whole image",
        "Cosine of each patch with the image's vector, over a whole photograph at several resolutions.",
    ),
}


@dataclass
class Query:
    """An image, its class, and its nearest training images with theirs, nearest first."""

    image: np.ndarray
    label: str
    neighbours: list[np.ndarray]
    neighbour_labels: list[str]


def as_rgb(image: np.ndarray) -> np.ndarray:
    """How an image of any number of channels is drawn: gray, two as magenta and green, or the first three.

    Shape:
        (H, W, C) uint8 -> (H, W, 3) uint8
    """
    drawn = {1: [0, 0, 0], 2: [0, 1, 0], 3: None}.get(image.shape[2], [0, 1, 2])
    return image if drawn is None else image[:, :, drawn]


def neighbours(queries: Sequence[Query], side: int = 84) -> Image.Image:
    """One row per query: its class, itself, then its neighbours, framed by right or wrong."""
    gap, between, name_width = 8, 26, 150
    columns = max(len(query.neighbours) for query in queries)
    width = name_width + side + between + columns * (side + gap) - gap
    page = Image.new("RGB", (width, len(queries) * (side + gap) - gap), canvas.WHITE)
    draw = ImageDraw.Draw(page)
    for row, query in enumerate(queries):
        top = row * (side + gap)
        name = canvas.shortened(query.label.replace("_", " "), canvas.BODY, name_width - 12)
        draw.text((0, top + side // 2), name, canvas.INK, canvas.font(canvas.BODY), anchor="lm")
        page.paste(canvas.tile(as_rgb(query.image), side), (name_width, top))
        left = name_width + side + between
        for image, label in zip(query.neighbours, query.neighbour_labels, strict=True):
            frame = canvas.RIGHT if label == query.label else canvas.WRONG
            page.paste(canvas.tile(as_rgb(image), side, frame), (left, top))
            left += side + gap
    return page


@torch.no_grad()
def focus_map(
    backbone: Backbone,
    photo: np.ndarray,
    short_side: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
) -> np.ndarray:
    """Where a whole photograph matters to its vector.

    How much the class token looks at each patch, mean over heads; in a family without one, whose image
    vector is the mean of its patches, the cosine of each patch with that vector. The photograph is
    resized to that short side, each side then to the nearest number of whole patches.

    Shape:
        photo (H, W, C) uint8 -> (h, w) float32
    """
    photo = at_most_two_to_one(photo)
    scale = short_side / min(photo.shape[:2])
    least = max(backbone.min_size, backbone.stride)
    height, width = (
        max(least, round(side * scale / backbone.stride) * backbone.stride) for side in photo.shape[:2]
    )
    images = torch.tensor(resized(photo, height, width)).permute(2, 0, 1)[None].to(device)
    with untouched(backbone):
        backbone.eval()
        normal = normalize(images, mean, std)
        if backbone.has_attention:
            focus = backbone.attention(normal)[0].float().mean(dim=0)
        else:
            features = backbone(normal)
            alike = torch.cosine_similarity(features.patches.float(), features.cls[:, None].float(), dim=-1)
            focus = alike[0].unflatten(0, features.grid)
    return focus.cpu().numpy()


def at_most_two_to_one(photo: np.ndarray) -> np.ndarray:
    """The middle of a photograph whose long side is more than twice the short one; others as they are."""
    height, width = photo.shape[:2]
    high, wide = min(height, 2 * width), min(width, 2 * height)
    top, left = (height - high) // 2, (width - wide) // 2
    return photo[top : top + high, left : left + wide]


def heat_over(photo: np.ndarray, attention: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Attention as a glow over the grayscale photograph.

    Shape:
        photo (H, W, C) uint8, attention (h, w) -> image of `size` (width, height)
    """
    low, high = np.percentile(attention, (5, 99.5))
    strength = ((attention - low) / max(high - low, 1e-12)).clip(0, 1).astype(np.float32)
    glow = np.array(Image.fromarray(strength).resize(size, Image.Resampling.BILINEAR), np.float64)
    anchors = np.linspace(0, 1, len(HEAT))
    colors = np.stack([np.interp(glow, anchors, channel) for channel in HEAT.T], axis=-1)
    gray = Image.fromarray(as_rgb(photo)).convert("L").resize(size, Image.Resampling.LANCZOS)
    opacity = 0.85 * glow[..., None] ** 0.7
    mixed = 0.55 * np.array(gray, np.float64)[..., None] * (1 - opacity) + colors * opacity
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def focus_row(
    photo: np.ndarray, maps: Sequence[tuple[str, np.ndarray]], width: int, gap: int = 10
) -> Image.Image:
    """The photograph, then each map over it with its caption below; `width` pixels in all."""
    photo = at_most_two_to_one(photo)
    columns = len(maps) + 1
    each = (width - gap * (columns - 1)) // columns
    size = (each, round(each * photo.shape[0] / photo.shape[1]))
    shown = [("photograph", Image.fromarray(as_rgb(photo)).resize(size, Image.Resampling.LANCZOS))]
    shown += [(caption, heat_over(photo, attention, size)) for caption, attention in maps]
    page = Image.new("RGB", (width, size[1] + canvas.SMALL + 12), canvas.WHITE)
    draw = ImageDraw.Draw(page)
    for column, (caption, image) in enumerate(shown):
        left = column * (each + gap)
        page.paste(image, (left, 0))
        text = canvas.shortened(caption, canvas.SMALL, each)
        draw.text((left, size[1] + 6), text, canvas.GRAY, canvas.font(canvas.SMALL))
    return page


def summary(
    title: str,
    queries: Sequence[Query],
    photo: np.ndarray,
    maps: Sequence[tuple[str, np.ndarray]],
    has_attention: bool,
    series: Mapping[str, Points],
    bars: Mapping[str, float],
    width: int = 860,
) -> Image.Image:
    """One picture of a run: neighbours at the left; attention over the learning curve at the right."""
    left = canvas.panel(
        neighbours(queries),
        "Nearest neighbours of held-out images",
        "Left: validation images, evenly chosen. Right: their nearest training images by cosine similarity, "
        "framed green where the class is the same and orange where it is not.",
    )
    focus = canvas.panel(focus_row(photo, maps, width), *FOCUS[has_attention])
    curve = canvas.panel(
        learning_curve(series, bars, width),
        "k-NN accuracy on held-out images, %",
        "Dashed: what the network has to beat.",
    )
    body = canvas.beside([left, canvas.stacked([focus, curve], gap=36)], gap=56)
    head = Image.new("RGB", (body.width, 48), canvas.WHITE)
    text = canvas.shortened(title, 34, body.width)
    ImageDraw.Draw(head).text((0, 0), text, canvas.INK, canvas.font(34))
    return canvas.margin(canvas.stacked([head, body], gap=24), 40)
