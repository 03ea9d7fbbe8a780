"""Batch norms of student and teacher: synchronised ones on CUDA, their statistics, and a step on a GPU."""

import logging
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from config_observers import left_as_found
from torch import nn

from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation, batch_norms, running_statistics
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints, processes
from nestling.ssl.run.log import read

OPTIONS = {"embed_dim": 16, "depth": 2, "num_heads": 2}
HEAD = {"num_prototypes": 32, "hidden_dim": 16, "bottleneck_dim": 8, "batch_norm": True}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass
class Place:
    """What `synchronise_batch_norms` asks of accelerate, which can't be had without the machines."""

    num_processes: int
    device: torch.device


def method() -> SelfDistillation:
    torch.manual_seed(0)
    return SelfDistillation(
        Config(backbone=schema.Backbone("xcit_nano_12_p4", 0.1, OPTIONS), head=schema.Head(**HEAD))
    )


def synchronised() -> SelfDistillation:
    distillation = method()
    assert nn.SyncBatchNorm.convert_sync_batchnorm(distillation) is distillation
    return distillation


def test_synchronised_norms_of_the_teacher_train_and_the_rest_of_it_evaluates():
    distillation = synchronised()
    for mode in (None, True):  # as converted, and after it was asked once more
        if mode is not None:
            distillation.train(mode)
        norms = list(batch_norms(distillation.teacher))
        assert len(norms) == len(list(batch_norms(method().teacher))) > 4
        for norm in norms:
            assert isinstance(norm, nn.SyncBatchNorm)
            assert norm.training
        others = [module for module in distillation.teacher.modules() if module not in norms]
        assert not any(module.training for module in others)
        assert all(module.training for module in distillation.student.modules())
    assert not any(module.training for module in distillation.eval().modules())


def test_a_synchronised_teacher_still_gets_no_gradient_and_keeps_its_keys():
    plain, distillation = method(), synchronised()
    assert not any(parameter.requires_grad for parameter in distillation.teacher.parameters())
    assert all(parameter.requires_grad for parameter in distillation.student.parameters())
    assert distillation.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(distillation.state_dict())


def test_only_statistics_that_are_not_synchronised_are_left_to_average():
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(4), nn.BatchNorm2d(5, track_running_stats=False))
    mixed = nn.Sequential(nn.LayerNorm(3), nn.SyncBatchNorm(6), plain)
    expected = [plain[0].running_mean, plain[0].running_var, plain[1].running_mean, plain[1].running_var]
    found = running_statistics(mixed)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs, "the buffers themselves, as they are written in place"


def test_a_method_leaves_its_statistics_to_be_averaged_unless_it_is_synchronised():
    plain = method()
    for network in (plain.student, plain.teacher):
        assert len(running_statistics(network)) == 2 * len(list(batch_norms(network)))
    distillation = synchronised()
    assert running_statistics(distillation.student) == running_statistics(distillation.teacher) == []


@pytest.mark.parametrize(
    ("device", "num_processes", "converted"),
    [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False), ("cpu", 1, False)],
)
def test_norms_are_synchronised_on_cuda_with_several_processes_alone(
    device, num_processes, converted, monkeypatch, request
):
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("nestling")
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    request.addfinalizer(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.INFO)  # not the attribute: it caches what an earlier level let through
    distillation = method()
    processes.synchronise_batch_norms(distillation, Place(num_processes, torch.device(device)))
    kinds = {isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(distillation)}
    assert kinds == {converted}
    assert len(said) == (1 if num_processes > 1 else 0), "several processes are told, and once"
    assert all("12 batch norms" in sentence for sentence in said)


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpu_trains_in_half_precision_with_its_state_in_full(precision, image_folder, tmp_path):
    out = tmp_path / "run"
    settings = Config(
        out=str(out),
        data=schema.Data(train=str(image_folder(per_class=12, size=20)), num_workers=0, holdout=0.25),
        backbone=schema.Backbone("xcit_nano_12_p4", 0.1, OPTIONS),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(**HEAD),
        optim=schema.Optim(lr=1e-3, lr_scaling="none", warmup_epochs=1),
        train=schema.Train(epochs=8, batch_size=8, precision=precision),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0),
        log=schema.Log(every=1, progress="none"),
    )
    initial = method().student.state_dict()
    with left_as_found():
        pretrain(settings)
    records = read(out / "log.jsonl")[1:]
    assert len(records) == 24
    assert all(0 < record["loss"] < 100 for record in records)
    newest = checkpoints.newest(out)
    assert newest is not None
    checkpoint = checkpoints.load(newest)
    assert (checkpoint.trainer["scaler"] is not None) == (precision == "fp16")
    for name in checkpoints.TENSORS:
        for key, value in getattr(checkpoint, name).items():
            if value.is_floating_point():
                assert value.dtype == torch.float32, key
                assert value.isfinite().all(), key
    # From the same seed: the student learned and the teacher followed.
    key = "backbone.cls_token"
    assert not torch.equal(checkpoint.student[key], initial[key])
    assert not torch.equal(checkpoint.teacher[key], initial[key])
    assert not torch.equal(checkpoint.teacher[key], checkpoint.student[key])
