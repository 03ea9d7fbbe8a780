"""Half precision: what stays in fp32, how far it strays, and a step that overflowing gradients skip."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from config_observers import left_as_found
from torch import nn

from nestling.ssl import config as schema
from nestling.ssl import optim
from nestling.ssl.config import Config, Optim
from nestling.ssl.distillation import SelfDistillation, build_network
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read
from nestling.ssl.schedules import StepValues

VALUES = StepValues(
    lr=0.1,
    weight_decay=0.1,
    momentum=0.9,
    temperature=0.04,
    last_layer_frozen=False,
    backbone_frozen=False,
)


def tiny(**changes) -> Config:
    return Config(
        backbone=schema.Backbone("xcit_nano_12_p4", 0.0, {"embed_dim": 16, "depth": 2, "num_heads": 2}),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=32, hidden_dim=16, bottleneck_dim=8, freeze_epochs=0),
        optim=schema.Optim(lr=1e-3, lr_scaling="none", warmup_epochs=1),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0, every=0),
        log=schema.Log(every=1, progress="none"),
        **changes,
    )


def trained(data, out, precision) -> tuple[checkpoints.Checkpoint, list[dict[str, float]]]:
    settings = tiny(
        out=str(out),
        data=schema.Data(train=str(data), num_workers=0),
        train=schema.Train(epochs=13, batch_size=8, precision=precision, checkpoint_every=13),
    )
    with left_as_found():
        pretrain(settings)
    newest = checkpoints.newest(out)
    assert newest is not None
    return checkpoints.load(newest), read(out / "log.jsonl")[1:]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative, over all weights together."""
    keys = [key for key, value in other.items() if value.is_floating_point()]
    apart = torch.stack([(one[key] - other[key]).norm() for key in keys]).norm()
    return float(apart / torch.stack([other[key].norm() for key in keys]).norm())


@pytest.mark.slow
def test_bf16_stays_close_to_fp32_over_fifty_steps_and_saves_all_in_fp32(image_folder, tmp_path):
    """Over seeds of the images, off by at most 0.03 of 0.8 in the first losses and 2 % in gradients.

    After 52 steps, the loss having risen to 5.3: 0.13 at worst and 0.03 on average, 0.2 % of the student's
    weights, 0.016 % of the teacher's, 4 % of the center.
    """
    data = image_folder(per_class=12, size=20)
    half, half_log = trained(data, tmp_path / "half", "bf16")
    full, full_log = trained(data, tmp_path / "full", "fp32")
    assert len(half_log) == len(full_log) == 52
    for one, other in zip(half_log[:4], full_log[:4], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.05)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=0.05)
    gaps = [abs(one["loss"] - other["loss"]) for one, other in zip(half_log, full_log, strict=True)]
    assert max(gaps) < 0.4
    assert sum(gaps) / len(gaps) < 0.1
    assert distance(half.student, full.student) < 0.006
    assert distance(half.teacher, full.teacher) < 0.0005
    assert distance(half.terms, full.terms) < 0.12
    assert [one["loss"] for one in half_log] != [other["loss"] for other in full_log], "bf16 was used"
    for name in checkpoints.TENSORS:
        for key, value in getattr(half, name).items():
            assert value.dtype == getattr(full, name)[key].dtype
            assert not value.is_floating_point() or value.dtype == torch.float32, key
    for state in half.optimizer["state"].values():
        assert all(value.dtype == torch.float32 for value in state.values())
    assert half.terms["dino.center.center"].norm() > 0


def test_under_bf16_the_networks_compute_in_it_and_loss_center_and_gradients_do_not():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    method = SelfDistillation(tiny())
    student = accelerator.prepare(method.student)
    views = [torch.randn(8, 3, 16, 16), torch.randn(8, 3, 8, 8)]
    with accelerator.autocast():
        targets = method.targets(views[0], 4)
    seen = student(views, 4)
    assert {logits.dtype for logits in (*seen.logits, *targets.logits)} == {torch.bfloat16}
    seen.logits, targets.logits = list(seen.logits), list(targets.logits)
    loss, metrics = method.loss(seen, targets, 0.04)
    assert loss.dtype == torch.float32
    assert {value.dtype for value in metrics.values()} == {torch.float32}
    accelerator.backward(loss)
    assert {parameter.grad.dtype for parameter in method.student.parameters()} == {torch.float32}
    method.update_teacher(0.9)
    center = method.terms["dino"].center.center
    assert center.dtype == torch.float32
    # The mean of bf16 logits, gathered in fp32: a sum in bf16 would be off by a thousandth and more.
    expected = 0.1 * targets.logits[0].double().mean(dim=0)
    torch.testing.assert_close(center.double(), expected, rtol=1e-5, atol=1e-8)


def test_the_loss_of_bf16_logits_is_that_of_the_same_logits_in_fp32():
    torch.manual_seed(0)
    method = SelfDistillation(tiny())
    student = method.student([torch.randn(8, 3, 16, 16), torch.randn(8, 3, 8, 8)], 4)
    teacher = method.targets(torch.randn(8, 3, 16, 16), 4)
    for outputs in (student, teacher):
        outputs.logits = [logits.bfloat16() for logits in outputs.logits]
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = method.loss(student, teacher, 0.04)
    for outputs in (student, teacher):
        outputs.logits = [logits.float() for logits in outputs.logits]
    full, _ = method.loss(student, teacher, 0.04)
    assert half.item() == pytest.approx(full.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lars"])
def test_a_step_whose_gradients_overflow_is_skipped_and_seen_to_be(name):
    """As accelerate does with fp16: scale the loss, and leave out the step that found an infinity."""
    Accelerator(cpu=True)  # what the wrapper below reads
    torch.manual_seed(0)
    network = build_network(tiny())
    own = optim.build(Optim(name=name), optim.parameter_groups(network), fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(own, scaler=scaler)
    optim.apply(own, VALUES)
    before = {key: value.clone() for key, value in network.named_parameters()}

    backward(network, scaler)
    next(network.parameters()).grad[0] = torch.inf
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert all(torch.equal(value, before[key]) for key, value in network.named_parameters())
    assert not own.state, "no momentum was made of it"
    assert scaler.get_scale() == 512.0

    backward(network, scaler)
    optimizer.step()
    assert not optimizer.step_was_skipped
    moved = [key for key, value in network.named_parameters() if not torch.equal(value, before[key])]
    assert len(moved) > len(before) / 2
    assert all(value.isfinite().all() for value in network.parameters())
    assert scaler.get_scale() == 512.0


def test_a_scaled_step_is_the_plain_step():
    """Scaling by a power of two and back changes no bit of the gradients, nor of what they do."""
    Accelerator(cpu=True)
    networks = []
    for scale in (1.0, 4096.0):
        torch.manual_seed(0)
        network = build_network(tiny())
        own = optim.build(Optim(), optim.parameter_groups(network), fused=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = AcceleratedOptimizer(own, scaler=scaler)
        optim.apply(own, VALUES)
        for _ in range(3):
            backward(network, scaler)
            scaler.unscale_(own)
            optim.clip(network.parameters(), "per_parameter", 0.01)
            optimizer.step()
            optimizer.zero_grad()
        networks.append(network)
    for (name, plain), (_, scaled) in zip(*(network.named_parameters() for network in networks), strict=True):
        assert torch.equal(plain, scaled), name


def backward(network: nn.Module, scaler: torch.amp.GradScaler) -> None:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    scaler.scale(network([images], 4).logits[0].square().mean()).backward()
