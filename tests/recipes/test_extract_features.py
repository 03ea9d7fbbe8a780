"""extract_features as a user starts it: what files hold, stopping and going on, mistakes in words."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from export_subjects import write_run
from full_disks import files_of_at_most
from image_folder import texture, write_image_folder
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nestling
from nestling import backbones
from nestling.recipes.extract_features import main
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.errors import UserError
from nestling.ssl.run.loading import load_backbone
from nestling.ssl.trained import file_sha256
from nestling.ssl.views.evaluation import eval_view
from nestling.ssl.views.render import normalize

POOLINGS = ["cls", "mean_patch", "last2:cls+mean_patch", "patches"]
VECTORS = POOLINGS[:3]
SMALL = ["batch_size=4", "part=4", "data.num_workers=0"]
SIDE = 48


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of a ViT, and images of three classes of which five can't be read, all of one part among them."""
    place = tmp_path_factory.mktemp("extract")
    write_run(place / "run", "vit")
    write_image_folder(place / "images", classes=3, per_class=7, size=40)
    for name in ("class_0/0004", "class_0/0005", "class_0/0006", "class_1/0000", "class_2/0003"):
        (place / f"images/{name}.png").write_bytes(b"no image")
    return place


def extract(place: Path, out: Path, *settings: str, checkpoint: Path | None = None) -> Path:
    usual = [f"data.train={place / 'images'}", "data.max_bad_share=0.3", *SMALL]
    given = {setting.partition("=")[0]: setting for setting in [f"out={out}", *usual, *settings]}
    main([str(checkpoint or place / "run"), *given.values()])
    return out


@pytest.fixture(scope="module")
def extracted(place) -> Path:
    """All poolings in all formats."""
    poolings, formats = f"pooling=[{','.join(POOLINGS)}]", "formats=[npy,safetensors,parquet,faiss]"
    return extract(place, place / "whole", poolings, formats, f"size={SIDE}", "crop_ratio=0.8")


def name_of(pooling: str) -> str:
    return pooling.replace(":", "_")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_hand(place: Path, path: str) -> dict[str, torch.Tensor]:
    """One image alone, straight through the backbone."""
    checkpoint = next((place / "run/checkpoints").iterdir())
    backbone, config = load_backbone(checkpoint)
    view = torch.from_numpy(eval_view(Decoder().file(path), SIDE, 0.8))[None]
    with torch.no_grad():
        before, last = backbone.last_blocks(normalize(view, config.data.mean, config.data.std), 2)
    mean = last.patches.mean(1)
    return {
        "cls": last.cls[0],
        "mean_patch": mean[0],
        "last2:cls+mean_patch": torch.cat([before.cls, last.cls, mean], 1)[0],
        "patches": last.patches.unflatten(1, last.grid)[0],
    }


def test_row_i_is_what_line_i_names_and_unreadable_images_are_listed(place, extracted):
    rows, lost = lines(extracted / "rows.jsonl"), lines(extracted / "unreadable.jsonl")
    every = sorted(str(path) for path in (place / "images").rglob("*.png"))
    assert sorted([*(row["path"] for row in rows), *(row["path"] for row in lost)]) == every
    assert [every[row["index"]] for row in rows] == [row["path"] for row in rows]
    assert len(lost) == 5
    assert all("no image" in row["reason"] for row in lost)
    assert all(row["label"] == Path(row["path"]).parent.name for row in rows)
    arrays = {pooling: np.load(extracted / f"{name_of(pooling)}.npy", mmap_mode="r") for pooling in POOLINGS}
    assert all(isinstance(array, np.memmap) for array in arrays.values())
    assert arrays["patches"].shape == (16, 3, 3, 32)
    for row in (0, 7, 15):
        for pooling, expected in by_hand(place, rows[row]["path"]).items():
            assert np.abs(arrays[pooling][row] - expected.numpy()).max() < 1e-5, pooling


def test_all_formats_hold_the_same_rows_and_their_provenance(place, extracted):
    weights = next((place / "run/checkpoints").iterdir()) / "teacher.safetensors"
    facts = json.loads((extracted / "features.json").read_text())
    said = {"sha256": file_sha256(weights), "network": "teacher", "size": SIDE, "crop_ratio": 0.8}
    said |= {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3], "backbone": "vit_tiny_p16"}
    assert said.items() <= facts.items()
    assert (facts["rows"], facts["left_out"]) == (16, 5)
    assert {path.name for path in extracted.iterdir()} == {"features.json", *facts["files"]}
    rows = lines(extracted / "rows.jsonl")
    for pooling in POOLINGS:
        expected, base = np.load(extracted / f"{name_of(pooling)}.npy"), extracted / name_of(pooling)
        with safe_open(f"{base}.safetensors", "np") as file:
            inside = json.loads(file.metadata()["nestling"])
            assert np.array_equal(file.get_tensor("features"), expected)
        assert (said | {"pooling": pooling}).items() <= inside.items()
        assert inside["nestling"] == facts["nestling"]
        if pooling == "patches":
            assert not Path(f"{base}.parquet").exists()
            continue
        table = pq.read_table(f"{base}.parquet")
        assert json.loads(table.schema.metadata[b"nestling"]) == inside
        assert np.array_equal(np.stack(table["features"].to_numpy()), expected)
        assert table["path"].to_pylist() == [row["path"] for row in rows]
        assert table["label"].to_pylist() == [row["label"] for row in rows]
        index = faiss.read_index(f"{base}.faiss")
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(index.reconstruct_n(0, 16), unit, atol=1e-6)
        similarity, ids = index.search(unit, 1)
        assert ids[:, 0].tolist() == list(range(16))
        assert np.abs(similarity - 1).max() < 1e-5


def test_other_batches_give_the_same_rows_in_the_same_order_to_rounding(place, extracted, tmp_path):
    other = extract(place, tmp_path, f"size={SIDE}", "crop_ratio=0.8", "batch_size=5", "part=null")
    assert (other / "rows.jsonl").read_bytes() == (extracted / "rows.jsonl").read_bytes()
    found, expected = np.load(other / "cls.npy"), np.load(extracted / "cls.npy")
    assert np.abs(found - expected).max() < 1e-5


def test_half_precision_rounds_and_vectors_from_python_are_the_same(place, extracted, tmp_path):
    half = np.load(
        extract(place, tmp_path / "fp16", f"size={SIDE}", "crop_ratio=0.8", "dtype=float16") / "cls.npy"
    )
    full = np.load(extracted / "cls.npy")
    assert half.dtype == np.float16
    assert np.array_equal(half, full.astype(np.float16))
    same = [f"size={SIDE}", "crop_ratio=0.8", "precision=bf16"]
    coarse = np.load(extract(place, tmp_path / "bf16", *same) / "cls.npy")
    assert 1e-4 < np.abs(coarse - full).max() < 0.1
    model = nestling.load(place / "run", size=SIDE, crop_ratio=0.8)
    vectors = model.embed([row["path"] for row in lines(extracted / "rows.jsonl")], batch_size=4)
    assert np.abs(vectors - full).max() < 1e-5


def test_a_finished_extraction_is_left_as_it_is_and_only_overwrite_replaces_it(place, tmp_path, caplog):
    out = extract(place, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    before = (out / "cls.npy").stat().st_mtime_ns
    extract(place, out)
    assert (out / "cls.npy").stat().st_mtime_ns == before
    for changed, message in (
        ("size=32", r"began with size=64, now it is 32"),
        ("network=student", r"began with weights' sha256"),
        (f"data.train={place / 'images/class_1'}", r"began with number of images=21, now it is 7"),
        ("formats=[faiss]", r"with formats=\['npy'\], not \['faiss'\]"),
    ):
        with pytest.raises(UserError, match=message + r".*overwrite=true"):
            extract(place, out, changed)
    extract(place, out, "pooling=[mean_patch]", "overwrite=true")
    assert {path.name for path in out.iterdir()} == {
        *("features.json", "rows.jsonl", "unreadable.jsonl", "mean_patch.npy", "notes.txt")
    }
    (out / "mean_patch.npy").unlink()
    with pytest.raises(UserError, match=r"lacks mean_patch\.npy; overwrite=true"):
        extract(place, out, "pooling=[mean_patch]")


def test_features_that_are_not_finite_name_their_images(place, tmp_path):
    """Weights as large as a run that diverged leaves them: half precision can't hold what comes out."""
    checkpoint, large = next((place / "run/checkpoints").iterdir()), tmp_path / "large/run"
    large.mkdir(parents=True)
    shutil.copy(checkpoint / "config.yaml", large)
    tensors = load_file(checkpoint / "teacher.safetensors")
    tensors["backbone.norm.weight"] *= 1e6
    save_file(tensors, large / "teacher.safetensors")
    with pytest.raises(UserError, match=r"cls holds NaN or infinity for .*0000\.png, .*0003\.png: .*float32"):
        extract(place, tmp_path / "out", "dtype=float16", checkpoint=large)
    assert not (tmp_path / "out/features.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["pooling=[cls, nose]"], r"nose is no read-out"),
        (["pooling=[last9:cls]"], r"last9:cls: vit_tiny_p16 shows .* 2 blocks"),
        (["pooling=[patches]", "formats=[faiss]"], r"hold.* no pooling=patches; add npy or safetensors"),
        (["size=50"], r"size=50"),
        (["size=320000000"], r"^memory ran out .*: give batch_size=\d+, smaller images"),
        (["out=IMAGES"], r"holds files that are no extraction"),
        (["data.max_bad_share=0.1"], r"\d of 21 images can't be read.*data\.max_bad_share"),
        (["data.on_error=raise"], r"0004\.png: is no image.*data\.on_error=skip"),
    ],
)
def test_a_mistake_is_one_sentence(place, tmp_path, settings, message):
    given = [setting.replace("IMAGES", str(place / "images")) for setting in settings]
    with pytest.raises(UserError, match=message):
        extract(place, tmp_path / "out", *given)


def test_a_weights_file_must_be_told_its_images(tmp_path):
    save_file(backbones.create("vit_tiny_p16", depth=1).state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match=r"names no images.*data\.train="):
        main([str(tmp_path / "vit.safetensors"), f"out={tmp_path / 'out'}"])


def test_a_full_disk_is_told_and_more_room_goes_on_to_the_same_files(place, extracted, tmp_path):
    same = [f"size={SIDE}", "crop_ratio=0.8", "pooling=[cls, patches]"]
    with files_of_at_most(15_000), pytest.raises(UserError, match=r"patches\.npy can't be written"):
        extract(place, tmp_path, *same)
    assert not (tmp_path / "features.json").exists()
    assert not (tmp_path / "patches.npy").exists()
    extract(place, tmp_path, *same)
    for name in ("cls.npy", "patches.npy", "rows.jsonl", "unreadable.jsonl"):
        assert (tmp_path / name).read_bytes() == (extracted / name).read_bytes()


def test_too_small_a_disk_is_refused_before_anything_is_computed(place, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"has 1 kB free and the extraction takes 5\.38 kB"):
        extract(place, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_killed_extraction_goes_on_on_two_processes_to_the_same_files(tmp_path, repository):
    """SIGKILL after a few of forty parts; every byte is that of one process that was left alone."""
    write_run(tmp_path / "run", "vit")
    images = write_image_folder(tmp_path / "images", classes=4, per_class=20, size=40)
    (images / "class_1/0003.png").write_bytes(b"no image")
    arguments = [str(tmp_path / "run"), f"data.train={images}", "batch_size=2", "part=2"]
    arguments += ["pooling=[cls, patches]", "formats=[npy, safetensors]", "data.num_workers=0"]
    script, stopped = str(repository / "recipes/extract_features.py"), tmp_path / "stopped"
    victim = subprocess.Popen([sys.executable, script, *arguments, f"out={stopped}"])
    while victim.poll() is None and len(list(stopped.glob(".extracting/part_*"))) < 5:
        time.sleep(0.001)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert 5 <= len(list(stopped.glob(".extracting/part_*"))) < 40
    assert [path.name for path in stopped.iterdir()] == [".extracting"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = subprocess.run(
        [*launcher, script, *arguments, f"out={stopped}"],
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert "image 80/80" in said
    assert "images/s  left 0:00:00" in said
    main([*arguments, f"out={tmp_path / 'alone'}"])
    for name in ("cls.npy", "patches.npy", "cls.safetensors", "rows.jsonl", "unreadable.jsonl"):
        assert (stopped / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    assert len(lines(stopped / "rows.jsonl")) == 79


@pytest.mark.parametrize("damaged", [False, True])
def test_finished_parts_are_kept_and_damaged_ones_computed_again(place, tmp_path, damaged):
    """Shown by an image that changes after its part was done."""
    images = shutil.copytree(place / "images", tmp_path / "images")
    extract(place, tmp_path / "whole", f"data.train={images}")
    with pytest.raises(UserError, match=r"0004\.png"):
        extract(place, tmp_path / "out", f"data.train={images}", "data.on_error=raise")
    with pytest.raises(UserError, match=r"began with crop_ratio=0\.875, now it is 0\.5"):
        extract(place, tmp_path / "out", f"data.train={images}", "crop_ratio=0.5")
    (part,) = tmp_path.glob("out/.extracting/part_*")
    Image.fromarray(texture(9, 40, np.random.default_rng(0))).save(images / "class_0/0002.png")
    if damaged:
        part.write_bytes(part.read_bytes()[:-8])  # as a disk that lost its last block leaves it
    extract(place, tmp_path / "out", f"data.train={images}", "part=8")
    found, expected = (np.load(tmp_path / name / "cls.npy") for name in ("out", "whole"))
    assert np.flatnonzero((found != expected).any(axis=1)).tolist() == ([2] if damaged else [])
