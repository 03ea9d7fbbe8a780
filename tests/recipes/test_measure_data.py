"""measure_data as a user starts it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from nestling.recipes.measure_data import main
from nestling.ssl.errors import UserError


def write(path, pixels):
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def folder(tmp_path):
    """Seven images, two of them alike, two unreadable ones and a text; returns the folder and the pixels."""
    root = tmp_path / "images"
    root.mkdir()
    random = np.random.default_rng(0)
    pixels = [
        write(root / f"{number}.png", random.integers(0, 256, (20 + 40 * number, 90, 3), dtype=np.uint8))
        for number in range(5)
    ]
    pixels.append(write(root / "twin.png", pixels[1]))
    deep = (100 + np.arange(50 * 60) % 4000).reshape(50, 60).astype(np.uint16)
    write(root / "deep.png", deep)
    pixels.append(np.repeat(np.round(deep[:, :, None] / 257).astype(np.uint8), 3, axis=2))
    (root / "broken.jpg").write_bytes(b"no image")
    with open(os.fsencode(root) + b"/\xff\xfe.png", "wb"):
        pass
    (root / "notes.txt").write_text("words")
    return root, pixels


def check(found, root, pixels):
    """What the fixture says about itself, by numpy."""
    all_pixels = np.concatenate([image.reshape(-1, 3) for image in pixels]) / 255
    assert np.allclose(found["mean"], all_pixels.mean(axis=0), rtol=1e-12)
    assert np.allclose(found["std"], all_pixels.std(axis=0), rtol=1e-12)
    assert (found["images"], found["measured"], found["readable"]) == (9, 9, 7)
    assert found["sizes"]["height"] == [20, 180]
    assert found["sizes"]["shorter_side_below_96"] == 7
    assert found["depths"] == {"uint16": {"images": 1, "low": 100, "high": 3099}}
    assert found["window"] == [100, 3099]
    assert found["duplicates"] == [[f"{root}/1.png", f"{root}/twin.png"]]
    assert [os.fsencode(item["path"]) for item in found["unreadable"]] == [
        os.fsencode(root) + name for name in (b"/broken.jpg", b"/\xff\xfe.png")
    ]


@pytest.mark.slow
def test_a_folder_is_measured_whole(folder, tmp_path, repository):
    root, pixels = folder
    out = tmp_path / "new/facts.json"
    command = [
        sys.executable,
        str(repository / "recipes/measure_data.py"),
        f"data.train={root}",
        f"out={out}",
    ]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*command, "data.num_workers=2"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    check(json.loads(out.read_text()), root, pixels)
    printed = done.stdout.splitlines()
    assert printed[0].startswith(f"9 images in {root}, left out 1 other file")
    assert printed[-4:] == [
        "unreadable: 2",
        f"  {root}/broken.jpg: is no image (starts with b'no image')",
        f"  {root}/\\xff\\xfe.png: is empty (0 bytes)",
        f"written to {out}",
    ]
    assert f"  {root}/1.png = {root}/twin.png" in printed
    assert "  data.window='[100.0, 3099.0]'" in printed
    alone = tmp_path / "alone.json"
    main([f"data.train={root}", f"out={alone}", "data.num_workers=0"])
    assert json.loads(alone.read_text()) == json.loads(out.read_text())


def test_what_is_printed_normalises_and_scales_as_it_says(folder, tmp_path, capsys):
    root, _ = folder
    main([f"data.train={root}", "data.num_workers=0", "data.mode=gray"])
    printed = capsys.readouterr().out.split()
    given = [
        printed[place] + printed[place + 1]
        for place in range(len(printed))
        if "data.window=" in printed[place]
    ]
    mean = next(word for word in printed if word.startswith("data.mean="))
    std = next(word for word in printed if word.startswith("data.std="))
    arguments = [word.replace("'", "") for word in (mean, std, given[0])]
    out = tmp_path / "facts.json"
    main([f"data.train={root}", "data.num_workers=0", "data.mode=gray", f"out={out}", *arguments])
    found = json.loads(out.read_text())
    assert found["window"] is None
    assert found["depths"]["uint16"]["low"] == 100
    assert "data.window=" not in capsys.readouterr().out


def test_at_most_so_many_images_are_read(folder, tmp_path, capsys):
    out = tmp_path / "facts.json"
    main([f"data.train={folder[0]}", "data.num_workers=0", "max_images=4", f"out={out}"])
    found = json.loads(out.read_text())
    assert (found["images"], found["measured"]) == (9, 4)
    assert "measured: 4 of them, evenly chosen" in capsys.readouterr().out


def test_images_of_many_channels_need_no_mean_to_be_measured(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 9, 5), dtype=np.uint8)
    np.save(tmp_path / "a.npy", images)
    out = tmp_path / "facts.json"
    channels = ["data.mode=unchanged", "data.in_chans=5"]
    main([f"data.train={tmp_path}/a.npy", "data.num_workers=0", *channels, f"out={out}"])
    assert np.allclose(json.loads(out.read_text())["mean"], images.mean(axis=(0, 1, 2)) / 255, rtol=1e-12)


def test_nothing_readable_is_a_report_too(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"none")
    main([f"data.train={tmp_path}", "data.num_workers=0"])
    assert "data.mean" not in (printed := capsys.readouterr().out)
    assert printed.splitlines()[-2:] == [
        "unreadable: 1",
        f"  {tmp_path}/a.png: is no image (starts with b'none')",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train=/nothing/here"], "data.train=/nothing/here: found nothing there"),
        (["data.mode=unchanged"], "data.mode=unchanged needs data.in_chans"),
        (["data.mode=gray", "data.in_chans=3"], "doesn't go with data.mode=gray"),
        (["out=/dev/null/facts.json"], "out=/dev/null/facts.json can't be written"),
        (["max_images=0"], "max_images=0"),
        (["train=/images"], "did you mean data.train"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message):
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_mistake_exits_with_2(repository):
    script = str(repository / "recipes/measure_data.py")
    done = subprocess.run(
        [sys.executable, script, "data.train=/nothing/here"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: data.train=/nothing/here")


def test_help_shows_the_keys(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {name}=" in printed for name in ("max_images", "out", "data.train", "data.num_workers"))
