import numpy as np
import pytest
import torch
from torch import nn

from nestling.ssl import optim
from nestling.ssl.config import Backbone, Config, Head, Optim
from nestling.ssl.distillation import build_network
from nestling.ssl.schedules import StepValues


def network(norm_last_layer: bool = False):
    torch.manual_seed(0)
    return build_network(
        Config(
            backbone=Backbone("xcit_nano_12_p4", 0.0, {"embed_dim": 16, "depth": 2, "num_heads": 2}),
            head=Head(num_prototypes=32, hidden_dim=16, bottleneck_dim=8, norm_last_layer=norm_last_layer),
        )
    )


def values(**changes) -> StepValues:
    return StepValues(
        **{
            "lr": 0.1,
            "weight_decay": 0.4,
            "momentum": 0.9,
            "temperature": 0.04,
            "last_layer_frozen": True,
            "backbone_frozen": False,
            **changes,
        }
    )


def backward(net) -> None:
    torch.manual_seed(1)
    net([torch.randn(4, 3, 16, 16)], 4).logits[0].square().sum().backward()


def test_decay_spares_norms_biases_tokens_scales_and_temperatures():
    net = network()
    decayed, spared = optim.parameter_groups(net)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed_names = {names[id(p)] for p in decayed["params"]}
    spared_names = {names[id(p)] for p in spared["params"]}
    assert decayed_names | spared_names == set(names.values())
    assert not decayed_names & spared_names
    for part in ("bias", "norm", "cls_token", "temperature", "gamma"):
        assert any(part in name for name in spared_names), part
        assert not any(part in name for name in decayed_names), part
    assert "head.last_layer.weight_v" in decayed_names
    assert all(p.ndim >= 2 for p in decayed["params"])


@pytest.mark.parametrize("part", ["head.last_layer", "backbone"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lars"])
def test_a_frozen_part_is_bit_identical_while_frozen_and_moves_after(name, part):
    net = network()
    optimizer = optim.build(Optim(name=name), optim.parameter_groups(net))
    still = net.get_submodule(part)
    before = {key: value.clone() for key, value in still.named_parameters()}
    other = net.head.mlp[0].weight.clone()
    for step in range(4):
        frozen = step < 3
        optim.apply(optimizer, values())
        backward(net)
        if frozen:
            optim.freeze(still)
        optimizer.step()
        optimizer.zero_grad()
        same = all(torch.equal(value, before[key]) for key, value in still.named_parameters())
        assert same == frozen
    assert not torch.equal(net.head.mlp[0].weight, other)


def test_a_unit_gain_stays_exactly_one():
    net = network(norm_last_layer=True)
    optimizer = optim.build(Optim(), optim.parameter_groups(net))
    for _ in range(3):
        optim.apply(optimizer, values())
        backward(net)
        optimizer.step()
    assert torch.equal(net.head.last_layer.weight_g, torch.ones(32, 1))


def test_apply_sets_rate_and_decay_of_each_group():
    net = network()
    optimizer = optim.build(Optim(), optim.parameter_groups(net))
    optim.apply(optimizer, values(lr=0.5, weight_decay=0.2))
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.5, 0.0)]


def gradients(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(5, i + 1)) for i in range(4)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.randn(5, i + 1, generator=draw) * 10 ** (i - 1)
    return parameters


def test_clipping_per_parameter_is_the_plain_loop():
    ours, loop = gradients(), gradients()
    optim.clip(ours, "per_parameter", 3.0)
    for parameter in loop:
        coefficient = 3.0 / (parameter.grad.norm(2) + 1e-6)
        if coefficient < 1:
            parameter.grad.mul_(coefficient)
    for mine, theirs in zip(ours, loop, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("shape", [(1024, 160), (160, 1024), (1 + 2**17,)], ids=["large", "turned", "uneven"])
def test_norms_of_large_gradients_are_numpys_and_the_same_on_any_number_of_threads(shape):
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if shape[0] == 160:
        parameter.grad = parameter.grad.T.contiguous().T
    threads, norms = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            norms.append(optim.gradient_norms([parameter])[1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])
    numpys = np.linalg.norm(parameter.grad.double().numpy())
    np.testing.assert_allclose(norms[0].item(), numpys, rtol=1e-6)


def test_clipping_by_global_norm_is_torchs():
    ours, theirs = gradients(), gradients()
    total = optim.clip(ours, "global_norm", 3.0)
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(theirs, 3.0))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_no_clipping_changes_nothing_and_still_tells_the_norm():
    ours, untouched = gradients(), gradients()
    total = optim.clip(ours, "none", 1e-3)
    assert total > 100
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, untouched, strict=True))
