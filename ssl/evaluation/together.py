"""Several networks judged on the same images, each reading them as it was trained to."""

from collections.abc import Sequence
from typing import Any

from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.readouts import readout
from nestling.ssl.evaluation.settings import EvalData, override
from nestling.ssl.names import printable
from nestling.ssl.trained import Trained


def on_the_same_images(trained: Sequence[Trained], data: EvalData, knn: Any) -> list[Config]:
    """Their configs with the images of the first one, or those of `data`, and the settings in `knn`.

    What is held out is what the first one holds out. Normalisation and channels stay each network's own.

    Raises:
        UserError: no images are named, or a pooling is none.
    """
    first = trained[0].config
    override(first, "data", data)
    trained[0].refuse_nowhere()
    for one in trained:
        config = one.config
        for name in ("train", "val", "holdout", "root", "cache"):
            setattr(config.data, name, getattr(first.data, name))
        config.seed = first.seed
        override(config, "data", data)
        override(config, "knn", knn)
        for pooling in config.knn.pooling:
            readout(pooling)
    return [one.config for one in trained]


def names_of(paths: Sequence[str]) -> list[str]:
    """What tables call the networks: the last part of each path where all differ, else the whole.

    Raises:
        UserError: a path is given twice.
    """
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"{printable(twice)} is given twice: there is nothing to compare")
    short = [path.rstrip("/").rpartition("/")[2] for path in paths]
    return [printable(name) for name in (short if len(set(short)) == len(short) else paths)]
