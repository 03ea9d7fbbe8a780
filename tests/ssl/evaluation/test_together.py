"""What several networks that are judged at once share, and what stays their own."""

import pytest
from small_trained import write_trained

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.settings import EvalData
from nestling.ssl.evaluation.together import names_of, on_the_same_images
from nestling.ssl.trained import load_trained


def test_the_first_names_the_images_and_each_reads_them_its_own_way(tmp_path):
    runs = [write_trained(tmp_path / name) for name in ("one", "two")]
    trained = [load_trained(run) for run in runs]
    trained[0].config.seed, trained[0].config.data.holdout = 5, 0.3
    trained[1].config.data.mean = [0.1, 0.2, 0.3]
    first, second = on_the_same_images(trained, EvalData(num_workers=3), trained[0].config.knn)
    assert second.data.train == first.data.train == str(tmp_path / "one/train")
    assert (second.seed, second.data.holdout, second.data.num_workers) == (5, 0.3, 3)
    assert second.data.mean == [0.1, 0.2, 0.3] != first.data.mean
    given = on_the_same_images(trained, EvalData(train="elsewhere"), trained[0].config.knn)
    assert [config.data.train for config in given] == ["elsewhere"] * 2


def test_names_are_short_where_that_tells_them_apart():
    assert names_of(["runs/a", "runs/b/"]) == ["a", "b"]
    assert names_of(["x/run", "y/run"]) == ["x/run", "y/run"]
    assert names_of(["run"]) == ["run"]
    with pytest.raises(UserError, match="runs/a is given twice"):
        names_of(["runs/a", "runs/b", "runs/a"])
