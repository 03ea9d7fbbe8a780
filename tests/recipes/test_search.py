"""search as a user starts it: the table, the picture, whatever the features lie in, and mistakes in words."""

import json
import shutil

import numpy as np
import pytest
from export_subjects import write_run
from image_folder import write_image_folder
from PIL import Image

import nestling
from nestling.recipes.extract_features import main as extract
from nestling.recipes.search import main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.extraction.searching import FeatureFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Features of twelve images and of as many in one array; class_0/0001 is there twice."""
    place = tmp_path_factory.mktemp("search")
    write_run(place / "run", "vit")
    images = write_image_folder(place / "images", classes=3, per_class=4, size=64)
    shutil.copy(images / "class_0/0001.png", images / "class_2/0003.png")
    np.save(
        place / "images.npy", np.stack([np.asarray(Image.open(f)) for f in sorted(images.rglob("*.png"))])
    )
    shared = [
        str(place / "run"),
        "batch_size=4",
        "data.num_workers=0",
        "formats=[npy,safetensors,parquet,faiss]",
    ]
    extract(
        [*shared, f"data.train={images}", f"out={place / 'features'}", "pooling=[patches,mean_patch,cls]"]
    )
    extract([*shared, f"data.train={place / 'images.npy'}", f"out={place / 'of_array'}"])
    return place


def rows_of(printed: str) -> list[tuple[int, float]]:
    cells = [line.split("│")[1:3] for line in printed.splitlines() if line.startswith("│")]
    return [(int(row), float(similarity)) for row, similarity in cells]


def expected(place, pooling: str, image, k: int) -> list[int]:
    model = nestling.load(place / "run")
    every = model.embed(sorted((place / "images").rglob("*.png")), pooling)
    query = model.embed(image, pooling)[0]
    cosines = every @ query / np.linalg.norm(every, axis=1) / np.linalg.norm(query)
    return np.argsort(-cosines.round(5), kind="stable")[:k].tolist()


def test_the_nearest_images_are_listed_and_drawn(place, tmp_path, capsys):
    image, out = place / "images/class_0/0001.png", tmp_path / "nearest.png"
    main([str(place / "features"), str(image), "k=7", f"out={out}"])
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert [row for row, _ in rows] == expected(place, "mean_patch", image, 7)
    assert rows[:2] == [(1, 1.0), (11, 1.0)], "equal ones by row"
    assert f"│ {place / 'images/class_2/0003.png'}" in printed
    page = np.asarray(Image.open(out).convert("RGB"))
    query = page[30:168, 30:168]
    same = [
        left for left in range(180, page.shape[1] - 150) if (page[30:168, left : left + 138] == query).all()
    ]
    assert len(same) == 2, "itself and its copy beside it"


@pytest.mark.parametrize("kind", ["safetensors", "parquet", "faiss"])
def test_every_format_finds_the_same(place, tmp_path, capsys, kind):
    shutil.copytree(place / "features", tmp_path / "one")
    for other in {"npy", "safetensors", "parquet", "faiss"} - {kind}:
        (tmp_path / f"one/cls.{other}").unlink()
    facts = json.loads((tmp_path / "one/features.json").read_text())
    (tmp_path / "one/features.json").write_text(json.dumps(facts | {"formats": [kind]}))
    image, out = place / "images/class_1/0002.png", f"out={tmp_path / 'nearest.jpg'}"
    main([str(tmp_path / "one"), str(image), "k=99", "pooling=cls", out])
    assert [row for row, _ in rows_of(capsys.readouterr().out)] == expected(place, "cls", image, 12)


def test_a_file_stands_for_its_folder_and_its_pooling(place, tmp_path, capsys):
    image, out = place / "images/class_1/0002.png", f"out={tmp_path / 'nearest.jpg'}"
    main([str(place / "features/cls.faiss"), str(image), "k=4", out])
    named = rows_of(capsys.readouterr().out)
    main([str(place / "features"), str(image), "k=4", out, "pooling=cls"])
    assert rows_of(capsys.readouterr().out) == named
    assert FeatureFolder(place / "features").pooling == "mean_patch"


def test_images_that_are_no_files_are_drawn_and_those_that_are_gone_are_gray(place, tmp_path, capsys):
    image = place / "images/class_0/0001.png"
    main([str(place / "of_array"), str(image), "k=2", f"out={tmp_path / 'array.png'}"])
    array = np.load(place / "images.npy")
    moved = shutil.copytree(place / "of_array", tmp_path / "moved")
    facts = json.loads((moved / "features.json").read_text())
    facts["settings"]["data"]["train"] = str(tmp_path / "gone.npy")
    (moved / "features.json").write_text(json.dumps(facts))
    main([str(moved), str(image), "k=2", f"out={tmp_path / 'gone.png'}"])
    drawn, gone = (
        np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("array.png", "gone.png")
    )
    assert len(array) == 12
    assert (drawn[30:168, 30:168] == gone[30:168, 30:168]).all()
    assert drawn[30:168, 240:320].std() > 20
    assert (gone[30:168, 240:320] == 225).all()


def test_a_moved_checkpoint_must_have_the_same_weights(place, tmp_path):
    features, image = (
        shutil.copytree(place / "features", tmp_path / "features"),
        place / "images/class_0/0001.png",
    )
    facts = json.loads((features / "features.json").read_text())
    (features / "features.json").write_text(json.dumps(facts | {"checkpoint": str(tmp_path / "was here")}))
    out = f"out={tmp_path / 'nearest.png'}"
    with pytest.raises(UserError, match=r"was here is gone; give the same weights as checkpoint=PATH"):
        main([str(features), str(image), out])
    main([str(features), str(image), out, f"checkpoint={place / 'run'}"])
    other = write_run(tmp_path / "other", "xcit")
    with pytest.raises(UserError, match=r"are not those that made .*features"):
        main([str(features), str(image), out, f"checkpoint={other}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["images", "IMAGE"], r"images holds no finished extraction"),
        (["features", "nothing.png"], r"nothing\.png"),
        (["features", "IMAGE", "pooling=last4:cls"], r"has vectors of mean_patch, cls"),
        (["features", "IMAGE", "out=picture.txt"], r"must end in one of \.png"),
        (
            ["features/cls.faiss", "IMAGE", "pooling=mean_patch"],
            r"holds cls, not pooling=mean_patch; give its",
        ),
        (
            ["features/rows.jsonl", "IMAGE"],
            r"rows\.jsonl is no file of vectors .*; give its folder, features$",
        ),
        (["images.npy", "IMAGE"], r"images\.npy lies in no finished extraction"),
        (["features"], r"image is missing; add IMAGE"),
    ],
)
def test_a_mistake_is_one_sentence(place, monkeypatch, settings, message):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=message):
        main([setting.replace("IMAGE", "images/class_0/0001.png") for setting in settings])
