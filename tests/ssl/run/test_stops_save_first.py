"""A step is saved before it is judged; where judging was left out, the next start makes up for it."""

from itertools import count

import pytest
from config_observers import left_as_found

from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.errors import Stopped
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import line, read

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
        train=schema.Train(epochs=2, batch_size=8, precision="fp32", checkpoint_every=0.5, keep_last=9),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0, every=0.5),
        log=schema.Log(every=1, progress="none"),
    )


def log_of(out) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in read(out / "log.jsonl")
    ]


def interrupt_the_second_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, calls = OnlineKnn.judge, count(1)

    def interrupted(self: OnlineKnn, *arguments: object) -> dict[str, float]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return judge(self, *arguments)

    monkeypatch.setattr(OnlineKnn, "judge", interrupted)


@pytest.mark.slow
def test_a_run_ended_after_every_step_or_while_it_judges_ends_as_the_one_left_alone(
    image_folder, tmp_path, monkeypatch
):
    data, run, alone = image_folder(per_class=8, size=20), tmp_path / "stopped", tmp_path / "alone"
    with left_as_found():
        pretrain(judged_at_every_step(data, alone))
    stopped = judged_at_every_step(data, run)
    stopped.resume, stopped.train.max_hours = "auto", 0

    def judged() -> list[bool]:
        return ["knn/cls/top1_k3" in record for record in log_of(run)]

    for step in (1, 2):
        with left_as_found(), pytest.raises(Stopped, match=f"step_{step:08d} is saved"):
            pretrain(stopped)
        assert judged() == [True] * step + [False], "the step itself is judged by the next start"
    stopped.train.max_hours = None
    with monkeypatch.context() as patch, left_as_found():
        interrupt_the_second_judgement(patch)
        with pytest.raises(KeyboardInterrupt):
            pretrain(stopped)
    assert judged() == [True, True, True, False]
    assert checkpoints.newest(run) == run / "checkpoints/step_00000003", "it was saved before it was judged"
    stopped.train.max_hours = 0  # which stop no run that has only its last step left, or none
    for _ in range(2):
        with left_as_found():
            pretrain(stopped)
        assert log_of(run) == log_of(alone)
    for name in (checkpoints.LAST, checkpoints.BEST):
        assert (run / name).read_text() == (alone / name).read_text()
    one, other = ([checkpoints.load_trainer(path) for path in checkpoints.saved(out)] for out in (run, alone))
    assert one == other
    assert len(one) == 4

    # Killed after a step was saved, then judged: that it is the best stands in the log, not yet in `best`.
    for path in checkpoints.saved(run)[2:]:
        checkpoints.remove(path)
    checkpoints.point(run, checkpoints.BEST, checkpoints.saved(run)[0])
    records = read(run / "log.jsonl")[:3]
    records[2]["knn/cls/top1_k3"] = 2.0
    (run / "log.jsonl").write_text("".join(map(line, records)))
    stopped.train.max_hours = None
    with left_as_found():
        pretrain(stopped)
    assert [checkpoints.load_trainer(path)["best"] for path in checkpoints.saved(run)[2:]] == [2.0, 2.0]
    assert (run / checkpoints.BEST).read_text() == "checkpoints/step_00000002\n"
