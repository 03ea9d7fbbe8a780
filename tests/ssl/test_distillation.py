import copy

import pytest
import torch
from torch import nn

from nestling.ssl.config import Backbone, Config, Head
from nestling.ssl.distillation import SelfDistillation, batch_norms, feature_std


def method(drop_path: float = 0.0) -> SelfDistillation:
    torch.manual_seed(0)
    return SelfDistillation(
        Config(
            backbone=Backbone("xcit_nano_12_p4", drop_path, {"embed_dim": 16, "depth": 2, "num_heads": 2}),
            head=Head(num_prototypes=32, hidden_dim=16, bottleneck_dim=8),
        )
    )


def views(batch: int = 3, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2 * batch, 3, 32, 32, generator=draw),
        torch.randn(4 * batch, 3, 16, 16, generator=draw),
    ]


def test_the_teacher_starts_as_the_student_and_never_gets_a_gradient():
    distillation = method()
    crops = views()
    loss, _ = distillation.loss(distillation.student(crops, 3), distillation.targets(crops[0], 3), 0.04)
    loss.backward()
    for mine, theirs in zip(
        distillation.student.parameters(), distillation.teacher.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert mine.grad is not None
        assert theirs.grad is None


def test_the_teacher_never_drops_paths_in_either_mode():
    distillation = method(drop_path=0.5).train()
    crops = views()
    first, second = (distillation.targets(crops[0], 3).logits[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(1)
    one = distillation.student(crops, 3).logits[0]
    torch.manual_seed(2)
    assert not torch.equal(one, distillation.student(crops, 3).logits[0]), "the student does drop"


def test_batch_norms_of_the_teacher_see_their_own_batch_and_the_rest_of_it_evaluates():
    distillation = method(drop_path=0.5).train()
    assert all(norm.training for norm in batch_norms(distillation.teacher))
    others = [m for m in distillation.teacher.modules() if not isinstance(m, nn.BatchNorm2d)]
    assert not any(module.training for module in others)
    assert not any(module.training for module in distillation.eval().teacher.modules())


def test_an_exported_teacher_has_real_running_statistics():
    distillation = method()
    for seed in range(200):
        distillation.targets(views(seed=seed)[0], 3)
    exported = copy.deepcopy(distillation.teacher).eval()
    norm = next(iter(batch_norms(exported)))
    assert not torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
    crops = views(batch=16, seed=999)[0]
    trained = distillation.targets(crops, 16).logits[0]
    evaluated = exported([crops], 16).logits[0]
    initial = exported.requires_grad_(False)
    for module in batch_norms(initial):
        module.reset_running_stats()
    forgotten = initial([crops], 16).logits[0]
    assert (trained - evaluated).norm() < 0.2 * (trained - forgotten).norm()


def test_the_teacher_is_the_moving_average_of_the_student():
    distillation = method()
    crops = views()
    distillation.targets(crops[0], 3)
    expected = {}
    with torch.no_grad():
        for name, parameter in distillation.student.named_parameters():
            parameter.add_(torch.randn_like(parameter))
            expected[name] = distillation.teacher.get_parameter(name) * 0.9 + parameter * 0.1
    distillation.loss(distillation.student(crops, 3), distillation.targets(crops[0], 3), 0.04)
    distillation.update_teacher(0.9)
    for name, parameter in distillation.teacher.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def test_equal_weights_stay_equal_to_the_bit_and_momentum_one_holds_the_teacher():
    distillation = method()
    crops = views()
    before = copy.deepcopy(distillation.teacher.state_dict())
    distillation.targets(crops[0], 3)
    distillation.loss(distillation.student(crops, 3), distillation.targets(crops[0], 3), 0.04)
    distillation.update_teacher(0.37)
    with torch.no_grad():
        for parameter in distillation.student.parameters():
            parameter.add_(1.0)
    distillation.loss(distillation.student(crops, 3), distillation.targets(crops[0], 3), 0.04)
    distillation.update_teacher(1.0)
    for name, parameter in distillation.teacher.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_thousand_small_updates_are_not_lost_to_rounding():
    distillation = method()
    with torch.no_grad():
        for teacher, student in zip(
            distillation.teacher.parameters(), distillation.student.parameters(), strict=True
        ):
            teacher.fill_(1.0)
            student.fill_(0.0)
    distillation.terms = nn.ModuleDict()
    for _ in range(1000):
        distillation.update_teacher(0.9995)
    weight = next(distillation.teacher.parameters())
    assert weight.flatten()[0].item() == pytest.approx(0.9995**1000, rel=1e-4)


def test_all_sizes_go_through_one_forward_and_keep_their_order():
    distillation = method().eval()
    crops = views()
    together = distillation.student(crops, 3)
    apart = [distillation.student([crop], 3).logits[0] for crop in crops]
    assert [logits.shape for logits in together.logits] == [(6, 32), (12, 32)]
    for mine, theirs in zip(together.logits, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert len(together.views()) == 6
    assert torch.equal(together.views()[3], together.logits[1][3:6])


def test_the_spread_of_features_is_one_on_the_sphere_and_zero_when_collapsed():
    assert feature_std(torch.randn(4096, 64)).item() == pytest.approx(1.0, abs=0.02)
    assert feature_std(torch.ones(8, 64)).item() == pytest.approx(0.0, abs=1e-6)


def test_the_spread_equals_lightlys():
    from lightly.utils.debug import std_of_l2_normalized

    features = torch.randn(32, 16)
    assert feature_std(features).item() == pytest.approx(4 * std_of_l2_normalized(features).item(), rel=1e-5)
