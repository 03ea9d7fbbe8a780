"""A COCO-style json of coloured boxes and discs; for tests and smoke runs.

python tests/coco_shapes.py FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLORS = {"box": (230, 40, 40), "disc": (40, 60, 230)}


def write_shapes(folder: Path, num_images: int = 4, size: int = 64, seed: int = 0) -> Path:
    """Write folder/images/*.png and folder/instances.json; returns the json. Each image holds one of each."""
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(num_images):
        random = np.random.default_rng((seed, number))
        picture = Image.fromarray(random.integers(90, 130, (size, size + 16, 3), dtype=np.uint8))
        draw = ImageDraw.Draw(picture)
        for kind, name in enumerate(COLORS):
            side = int(random.integers(20, 28))
            left = int(random.integers(0, 10)) + kind * (size // 2 + 8)
            top = int(random.integers(0, size - side))
            (draw.rectangle if name == "box" else draw.ellipse)(
                (left, top, left + side, top + side), COLORS[name]
            )
            corners = [left, top, left + side, top, left + side, top + side, left, top + side]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 10 + number,
                    "category_id": 7 - 4 * kind,  # ids need not follow each other, nor the order of names
                    "bbox": [left, top, side, side],
                    "area": side * side,
                    "iscrowd": 0,
                    "segmentation": [corners],
                }
            )
        picture.save(folder / "images" / f"{number}.png")
        images.append({"id": 10 + number, "file_name": f"{number}.png", "height": size, "width": size + 16})
    categories = [{"id": 7 - 4 * kind, "name": name} for kind, name in enumerate(COLORS)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    return folder / "instances.json"


if __name__ == "__main__":
    write_shapes(Path(sys.argv[1]))
