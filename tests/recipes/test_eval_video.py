"""eval_video as a user starts it, on a made video of two squares that move."""

import json

import pytest
from dense_subjects import PALETTE, write_tiny_run, write_video
from PIL import Image

from nestling.recipes.eval_video import main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.masks import read_mask


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    write_tiny_run(folder / "run")
    write_video(folder / "DAVIS")
    return folder


def test_moving_squares_are_followed_and_the_masks_saved_as_davis_reads_them(place, capsys):
    main([str(place / "run"), str(place / "DAVIS"), "size=64", f"masks={place}/masks"])
    (file,) = (place / "run/results").glob("video_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["j_mean"] > 0.95
    assert found["results"]["f_mean"] > 0.95
    assert f"{100 * found['results']['jf_mean']:.1f}" in capsys.readouterr().out
    assert [(score["number"], len(score["regions"])) for score in found["objects"]] == [(1, 3), (2, 3)]
    masks = sorted((place / "masks/squares").iterdir())
    assert [path.name for path in masks] == [f"{index:05d}.png" for index in range(5)]
    with Image.open(masks[3]) as image:
        assert (image.mode, image.size, image.getpalette()[:9]) == ("P", (128, 64), PALETTE)
    given = read_mask(place / "DAVIS/Annotations/480p/squares/00000.png")
    assert (read_mask(masks[0]) == given).all()


def test_masks_alone_are_saved_where_only_the_first_frame_has_one(place, tmp_path):
    main([str(place / "run"), str(place / "DAVIS"), "size=64", f"out={tmp_path}/all.json"])
    annotations = place / "DAVIS/Annotations/480p/squares"
    hidden = annotations.rename(place / "hidden")
    annotations.mkdir()
    (annotations / "00000.png").write_bytes((hidden / "00000.png").read_bytes())
    try:
        main([str(place / "run"), str(place / "DAVIS"), "size=64", f"out={tmp_path}/first.json"])
    finally:
        (annotations / "00000.png").unlink()
        annotations.rmdir()
        hidden.rename(annotations)
    assert json.loads((tmp_path / "first.json").read_text())["results"] == {}
    for index in range(5):
        name = f"squares/{index:05d}.png"
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("squares\n".encode("utf-16"), r"made\.txt is no text in UTF-8 \(byte 1 is 0xff\)"),
        (b"squares\n../squares\n", r"made\.txt: \.\./squares is no name of a video"),
        (b"..", r"made\.txt: \.\. is no name"),
    ],
)
def test_a_list_of_anything_but_names_is_refused(place, listed, message):
    (place / "DAVIS/ImageSets/made.txt").write_bytes(listed)
    with pytest.raises(UserError, match=message):
        main([str(place / "run"), str(place / "DAVIS"), "split=made"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["split=2016/val"], r"there is no list of videos .*ImageSets/2016/val\.txt"),
        (["resolution=1080p"], r"the video squares has no frames: .*JPEGImages/1080p/squares holds no \.jpg"),
        (["propagation.topk=0"], r"propagation\.topk=0"),
        (
            ["size=400000000"],
            r"^memory ran out.*: give size=200000000 or propagation\.last_frames=3, smaller",
        ),
    ],
)
def test_a_mistake_is_one_sentence(place, arguments, message):
    with pytest.raises(UserError, match=message):
        main([str(place / "run"), str(place / "DAVIS"), *arguments])
