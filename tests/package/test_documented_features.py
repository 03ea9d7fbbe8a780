"""docs/features.md: its Python runs as it stands there, and so do its commands."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_subjects import write_run
from image_folder import write_image_folder
from PIL import Image

from nestling.recipes import extract_features, search

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
RECIPES = {"extract_features": extract_features.main, "search": search.main}
GIVEN = ("cls", "last2_cls+mean_patch", "patches")  # the tests' network has two blocks


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of a ViT that the page calls runs/pretrain, and images."""
    place = tmp_path_factory.mktemp("page")
    (place / "runs").mkdir()
    write_run(place / "runs/pretrain", "vit")
    for name, seed in (("train", 0), ("test", 1)):
        write_image_folder(place / name, classes=3, per_class=6, size=64, seed=seed)
    shutil.copy(place / "test/class_1/0000.png", place / "photo.jpg")
    return place


@pytest.mark.slow
def test_the_python_of_the_page_runs(place, monkeypatch):
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    for part in ("train", "test"):
        paths = sorted((place / part).rglob("*.png"))
        names |= {f"{part}_paths": paths, f"{part}_labels": [path.parent.name for path in paths]}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/features.md", "exec"), names)
    assert names["vectors"].shape == (18, 32)
    assert names["accuracy"] > 0.7  # a third by chance
    assert [level.shape[1] for level in names["outputs"].values()] == [32] * 4
    assert np.array_equal(names["model"].embed(names["train_paths"]), names["vectors"]), "nothing was trained"


@pytest.mark.slow
def test_the_commands_of_the_page_run(place, monkeypatch):
    """As their recipes' main sees them; how recipes are started is tested elsewhere."""
    monkeypatch.chdir(place)
    shown = re.findall(r"^(?:python|accelerate launch) recipes/(\w+)\.py (.*)$", PAGE, re.MULTILINE)
    assert [recipe for recipe, _ in shown] == 3 * ["extract_features"] + 2 * ["search"]
    for recipe, arguments in shown:
        arguments = arguments.replace("/images", str(place / "train")).replace("last4:", "last2:")
        RECIPES[recipe](shlex.split(arguments))
    kinds = {
        "features": ["cls.npy"],
        "more": [f"{name}.{kind}" for name in GIVEN for kind in ("npy", "safetensors")],
        "indexed": ["cls.npy", "cls.parquet", "cls.faiss"],
    }
    for out, files in kinds.items():
        assert json.loads((place / out / "features.json").read_text())["files"] == ["rows.jsonl", *files]
    assert np.load(place / "more/cls.npy").dtype == np.float16
    ten, eighteen = (np.asarray(Image.open(place / f"{name}.png")) for name in ("nearest", "similar"))
    assert ten.shape[0] < eighteen.shape[0], "more of them need more lines"
