"""An index that is removed from the cache while a run uses it: one sentence, in whichever process."""

import os
import pickle
import shutil

import numpy as np
import pytest
from planting import plant
from shard_writing import write_images

from nestling.ssl.config import Data
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.loader import EvalLoader
from nestling.ssl.data.sources.base import Subset
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.data.sources.shards import TarShards
from nestling.ssl.errors import UserError
from nestling.ssl.views.evaluation import Centre


def folder(tmp_path, cache):
    return Folder(plant(tmp_path / "images", "a/1.png", "b/1.png"), cache=cache)


def image_list(tmp_path, cache):
    (tmp_path / "list.txt").write_text("a.png\n")
    return ImageList(str(tmp_path / "list.txt"), cache=cache)


def shards(tmp_path, cache):
    return TarShards(write_images(tmp_path / "a.tar", 0, 2), Decoder(), cache=cache)


@pytest.mark.parametrize("open_source", [folder, image_list, shards])
@pytest.mark.parametrize("damage", ["removed", "emptied"])
def test_a_lost_index_is_said_when_an_image_is_asked_for(tmp_path, open_source, damage):
    cache = str(tmp_path / "cache")
    pickled = pickle.dumps(Subset(open_source(tmp_path, cache), [0]))
    if damage == "removed":
        shutil.rmtree(cache)
    else:
        os.truncate(next((tmp_path / "cache").rglob("names.npy")), 0)
    again = pickle.loads(pickled)
    with pytest.raises(UserError, match=r"cache/indexes/.* was removed or damaged while a run used it"):
        again.load(0)


def test_a_process_that_has_the_index_goes_on_without_it(tmp_path):
    source = folder(tmp_path, str(tmp_path / "cache"))
    assert source.load(1)[0, 0, 0] == 1
    shutil.rmtree(tmp_path / "cache")
    assert source.load(1)[0, 0, 0] == 1
    assert np.array_equal(source.sides(np.array([0])), [2])


@pytest.mark.slow
def test_a_spawned_loader_process_hands_the_sentence_over(tmp_path):
    source = folder(tmp_path, str(tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    loader = EvalLoader(
        source, Data(start_method="spawn"), Centre((16, 16), 1.0), batch_size=2, num_workers=1
    )
    with pytest.raises(UserError, match=r"was removed or damaged while a run used it") as refusal:
        list(loader)
    assert "Traceback" not in str(refusal.value)
