"""What a look at the images, and at what renders them, says before a run starts."""

import logging

from nestling.ssl.config import Config
from nestling.ssl.data.measuring.facts import suggested_window
from nestling.ssl.data.measuring.measure import depths_of
from nestling.ssl.data.sources.base import ImageSource, evenly
from nestling.ssl.names import printable
from nestling.ssl.views import render

logger = logging.getLogger("nestling")

DECODED = 8
LOOKED_AT = 20_000  # headers read, evenly chosen: seconds on a local disk


def say_if_not_compiled() -> None:
    """Say that compiled kernels are missing, which are left out where no compiler is."""
    if render.kernel is None:
        logger.info(
            "this installation has no compiled kernels, so views and, on a CPU, the loss take twice as long: "
            "with a C compiler on the machine, install nestling again"
        )


def warn_of_small(source: ImageSource, config: Config) -> None:
    """Say once how many images are smaller than the crops, and so are enlarged."""
    views = config.views
    key, limit = (
        ("views.local_size", min(views.local_size))
        if views.num_local
        else ("views.global_size", min(views.global_size))
    )
    looked_at = evenly(len(source), LOOKED_AT)
    sides = source.sides(looked_at)
    if sides is None:
        return
    small = int(((sides > 0) & (sides < limit)).sum())
    if small:
        of = f"{len(source)}" if len(looked_at) == len(source) else f"{len(looked_at)} looked at"
        logger.warning(
            f"{small} of {of} images in {printable(source.name)} have a shorter side below {key}={limit}, "
            f"the smallest {sides[sides > 0].min()} pixels: crops of them are enlarged, and those of a few "
            f"pixels look all alike; data.min_size={limit} leaves them out"
        )


def warn_of_shallow(config: Config) -> None:
    """Say where images of more than 8 bits use so little of their range that few gray levels are left."""
    if config.data.window is not None:
        return
    depths = depths_of(config.data, DECODED)
    window = suggested_window(depths)
    if window is not None:
        kinds, values = ", ".join(depths), f"{window[0]:g} to {window[1]:g}"
        logger.warning(
            f"images of {kinds} hold values from {values} (of {DECODED} looked at), which don't fit the "
            "range they are scaled from: gray levels are lost, or images scaled unlike each other; set "
            "data.window (recipes/measure_data.py looks at all images)"
        )
