"""A stop saves without judging; the start that goes on makes up for it."""

import pytest
from config_observers import left_as_found

from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.errors import Stopped
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

TIMES = ("images_per_second", "data_wait")


def judged_at_every_step(data, out) -> Config:
    return Config(
        out=str(out),
        data=schema.Data(train=str(data), num_workers=0, holdout=0.3),
        backbone=schema.Backbone("xcit_nano_12_p4", 0.0, {"embed_dim": 16, "depth": 1, "num_heads": 2}),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8, freeze_epochs=0),
        teacher=schema.Teacher(temperature_warmup_epochs=0, momentum=0.9),
        optim=schema.Optim(lr=1e-2, lr_scaling="none", warmup_epochs=0),
        train=schema.Train(epochs=2, batch_size=8, precision="fp32", checkpoint_every=1.0),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0, every=0.5),
        log=schema.Log(every=1, progress="none"),
    )


def log_of(out) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if key not in TIMES} for line in read(out / "log.jsonl")
    ]


@pytest.mark.slow
def test_a_run_stopped_after_every_step_judges_later_and_ends_as_the_one_left_alone(image_folder, tmp_path):
    data = image_folder(per_class=8, size=20)
    with left_as_found():
        pretrain(judged_at_every_step(data, tmp_path / "alone"))
    stopped = judged_at_every_step(data, tmp_path / "stopped")
    stopped.resume, stopped.train.max_hours = "auto", 0
    for step in (1, 2, 3, 4):
        with left_as_found(), pytest.raises(Stopped, match=f"step_{step:08d} is saved"):
            pretrain(stopped)
        judged = ["knn/cls/top1_k3" in line for line in log_of(tmp_path / "stopped")]
        assert judged == [True] * step + [False], "the step itself is judged by the next start"
    stopped.train.max_hours = None
    with left_as_found():
        pretrain(stopped)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "alone")
    for name in (checkpoints.LAST, checkpoints.BEST):
        assert (tmp_path / "stopped" / name).read_text() == (tmp_path / "alone" / name).read_text()
