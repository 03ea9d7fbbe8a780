"""eval_copy_detection as a user starts it, on made copies."""

import json

import pytest
from dense_subjects import write_copies, write_tiny_run

from nestling.recipes.eval_copy_detection import main
from nestling.ssl.errors import UserError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run and made copies, one of them unreadable."""
    folder = tmp_path_factory.mktemp("copies")
    write_tiny_run(folder / "run")
    write_copies(folder)
    (folder / "copydays/strong/200599.png").write_text("no image")
    return folder


def judged(place, *arguments):
    main([str(place / "run"), str(place / "copydays"), "size=32", f"out={place}/found.json", *arguments])
    return json.loads((place / "found.json").read_text())


def test_copies_find_their_originals_and_strangers_do_not(place, capsys):
    found = judged(place)
    results = found["results"]
    assert [*results] == ["original/map", "jpegqual/30/map", "strong/map"]
    assert results["original/map"] == 1
    assert results["jpegqual/30/map"] > 0.9
    assert results["strong/map"] < 0.5
    assert [path.rsplit("/", 1)[1] for path in found["unreadable"]] == ["200599.png"]
    assert f"{100 * results['strong/map']:.1f}" in capsys.readouterr().out
    main([str(place / "run"), f"{place}/run/../copydays", "size=32", f"out={place}/again.json"])
    assert json.loads((place / "again.json").read_text())["results"] == results
    whole = judged(place, f"distractors={place}/others", f"whitening={place}/more", "depth=3")
    assert whole["num_images"] == {"folder": 19, "distractors": 5, "whitening": 40}
    assert whole["results"]["original/map"] == 1
    assert whole["results"]["strong/map"] != results["strong/map"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefix=9"], r"200001\.jpg has no original: none begins with 200001 \(prefix=9\)"),
        (["max_bad_share=0"], r"1 of 19 images can't be read.*, more than max_bad_share=0"),
        (["folder=SET/strong"], r"must hold a folder original"),
        (["distractors=SET/strong"], r"distractors=.*strong lies in folder="),
        (["size=2"], r"size=2: "),
        (["size=400000000"], r"^memory ran out.*: give batch_size=8 or size=200000000, smaller images or a"),
    ],
)
def test_a_mistake_is_one_sentence(place, arguments, message):
    arguments = [argument.replace("SET", str(place / "copydays")) for argument in arguments]
    given = {argument.partition("=")[0] for argument in arguments}
    defaults = [f"folder={place}/copydays", "size=32", f"out={place}/none.json"]
    kept = [argument for argument in defaults if argument.partition("=")[0] not in given]
    with pytest.raises(UserError, match=message):
        main([str(place / "run"), *kept, *arguments])
