"""What are these images like? Mean and std to normalise by, sizes, duplicates, unreadable files.

    python recipes/measure_data.py data.train=/my/images
    python recipes/measure_data.py data.train=/my/images max_images=10000 out=facts.json

Images are read as training reads them, by several processes. Unreadable ones are listed, and no error.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from nestling.ssl.command_line import read, run
from nestling.ssl.config import Data, key


@dataclass
class MeasureData:
    """One look at a data set."""

    max_images: int | None = key(None, "images that are read, evenly chosen; null: all", low=1)
    out: str | None = key(None, "file of all that was found, as JSON; null: none")
    data: Data = field(default_factory=Data)


def main(argv: list[str]) -> None:
    """Measure data.train; prints what was found and writes it where `out` says."""
    settings = read(MeasureData, argv, program="recipes/measure_data.py", about=__doc__ or "")
    if os.environ.get("RANK", "0") != "0":  # one process of a launcher's measures
        return
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.measuring.measure import measure
    from nestling.ssl.data.measuring.report import lines
    from nestling.ssl.run.directory import writable, write_json

    out = writable(Path(settings.out)) if settings.out else None
    found = measure(settings.data, settings.max_images)
    for line in lines(found):
        print(line)
    if out:
        write_json(out, found)
        print(f"written to {out}")


if __name__ == "__main__":
    run(main)
