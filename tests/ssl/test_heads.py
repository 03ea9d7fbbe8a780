import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nestling.ssl.heads import ProjectionHead, PrototypeLayer


def head(**options) -> ProjectionHead:
    return ProjectionHead(8, 20, **{"hidden_dim": 16, "bottleneck_dim": 4, **options})


def test_the_last_layer_equals_torchs_weight_norm():
    theirs = nn.utils.parametrizations.weight_norm(nn.Linear(4, 20, bias=False)).double()
    ours = PrototypeLayer(4, 20, unit_norm=False).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(
        ours.weight_v.grad, theirs.parametrizations.weight.original1.grad, rtol=0, atol=1e-12
    )


def test_published_keys_load_with_and_without_unit_norm():
    published = {"weight_g": torch.ones(20, 1), "weight_v": torch.randn(20, 4)}
    for unit_norm in (True, False):
        layer = PrototypeLayer(4, 20, unit_norm)
        layer.load_state_dict(published)
        assert torch.equal(layer.weight_v, published["weight_v"])
        assert set(layer.state_dict()) == set(published)


def test_a_unit_gain_is_no_parameter():
    assert "last_layer.weight_g" not in dict(head(norm_last_layer=True).named_parameters())
    assert "last_layer.weight_g" in dict(head(norm_last_layer=False).named_parameters())


def test_a_head_can_be_deep_copied_and_pickled_after_a_backward():
    original = head()
    x = torch.randn(3, 8)
    original(x).sum().backward()
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert torch.equal(twin(x), original(x))


def test_logits_are_cosines_between_bottleneck_and_prototypes():
    projector = head()
    x = torch.randn(6, 8)
    expected = F.cosine_similarity(projector.mlp(x)[:, None], projector.last_layer.weight_v[None], dim=-1)
    torch.testing.assert_close(projector(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "batch_norm", "linears", "norms"), [(1, True, 1, 0), (2, False, 2, 0), (3, True, 3, 2)]
)
def test_every_hidden_layer_has_its_own_batch_norm(num_layers, batch_norm, linears, norms):
    layers = list(head(num_layers=num_layers, batch_norm=batch_norm).mlp)
    assert sum(isinstance(layer, nn.Linear) for layer in layers) == linears
    assert len({id(layer) for layer in layers if isinstance(layer, nn.BatchNorm1d)}) == norms
