"""What must hold for every registered name, whatever its family.

Names are built as they are where shapes suffice, and shallow and narrow where numbers are computed: many
names are the same network then, so one of each is run.
"""

import copy
import pickle

import pytest
import torch

from nestling import backbones
from nestling.backbones import registry

NAMES = backbones.names()
SHRUNK = {
    "vit": {"embed_dim": 64, "depth": 2, "num_heads": 2},
    "xcit": {"embed_dim": 64, "depth": 2, "num_heads": 2},
    "swin": {"embed_dim": 16, "depth": 2, "num_heads": 1},
}
ONE_PER_FAMILY = ["vit_small_p16", "vit_giant_p14", "swin_tiny_w7", "xcit_small_12_p16"]
FULL_SIZE = [pytest.param(n, marks=[] if n in ONE_PER_FAMILY[2:] else [pytest.mark.slow]) for n in NAMES]
DEFAULTS = {name: registry._REGISTRY[name][1] for name in NAMES}
SIZES = [(224, 224), (96, 96), (160, 160), (64, 128), None]  # None: the smallest legal


def family(name):
    return name.partition("_")[0]


def kind(name):
    """What a name still says once it is shrunk."""
    shared = SHRUNK[family(name)]
    return family(name), *sorted(item for item in DEFAULTS[name].items() if item[0] not in shared)


# One name per network: those of ONE_PER_FAMILY and one of every other.
DISTINCT = list({kind(name): name for name in [*NAMES[::-1], *ONE_PER_FAMILY]}.values())


def shrunk(name, **options):
    torch.manual_seed(0)
    return backbones.create(name, **{**SHRUNK[family(name)], **options})


def shallow(name):
    """One block, of Swin two: tracing takes long, and so the first stage's and the last's stay."""
    model = shrunk(name, depth=1)
    if family(name) == "swin":
        for stage in model.layers[1:3]:
            del stage.blocks[:]
    return model


def legal(model, size):
    """The size, or the next one up that the family takes."""
    if size is None:
        return (model.min_size, model.min_size)
    try:
        model.check_size(*size)
    except ValueError:
        size = tuple(-(-side // model.stride) * model.stride for side in size)
        model.check_size(*size)
    return size


def images_for(model, size=(64, 96), dtype=torch.float32):
    return torch.randn(2, 3, *legal(model, size), dtype=dtype)


def weights_of(features):
    """A random functional of both outputs, so that no gradient cancels."""
    generator = torch.Generator().manual_seed(1)
    return sum((x * torch.randn(x.shape, generator=generator)).sum() for x in features[:2])


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(found.cls, expected.cls, **tolerance)
    torch.testing.assert_close(found.patches, expected.patches, **tolerance)
    assert tuple(found.grid) == tuple(expected.grid)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_a_batch_without_images_has_features_without_rows(name):
    model = shrunk(name).eval()
    height, width = legal(model, (64, 96))
    features = model(torch.empty(0, 3, height, width))
    rows, columns = features.grid
    assert features.cls.shape == (0, model.embed_dim)
    assert features.patches.shape == (0, rows * columns, model.embed_dim)
    (features.cls.sum() + features.patches.sum()).backward()
    assert not any(gradient is not None and gradient.any() for gradient in gradients(model).values())


def test_every_family_is_here():
    assert {family(name) for name in NAMES} == SHRUNK.keys()
    assert set(ONE_PER_FAMILY) <= set(DISTINCT) <= set(NAMES)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*DISTINCT}))
def test_a_name_that_is_run_no_further_is_the_network_of_another_to_the_bit(name):
    (other,) = (shrunk(one) for one in DISTINCT if kind(one) == kind(name))
    model = shrunk(name)
    assert repr(model) == repr(other)
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FULL_SIZE)
def test_at_its_full_size_it_keeps_the_contract_on_the_meta_device(name):
    with torch.device("meta"):
        model = backbones.create(name).eval()
    assert isinstance(model, backbones.Backbone)
    assert model.name == name
    features = model(torch.empty(2, 3, *legal(model, (64, 96)), device="meta"))
    rows, columns = features.grid
    assert features.cls.shape == (2, model.embed_dim)
    assert features.patches.shape == (2, rows * columns, model.embed_dim)
    parameters = dict(model.named_parameters())
    assert 1e6 < sum(parameter.numel() for parameter in parameters.values()) < 2e9
    assert model.no_weight_decay() <= parameters.keys()
    model.check_size(model.min_size, model.min_size)


@pytest.mark.parametrize("name", DISTINCT)
def test_weight_decay_spares_all_but_matrices_and_kernels(name):
    model = shrunk(name, mask_token=True)
    spared = model.no_weight_decay()
    decayed = {key for key, p in model.named_parameters() if p.ndim > 1 and key not in spared}
    assert all(key.endswith(".weight") for key in decayed)
    matrices = {key for key, p in model.named_parameters() if key.endswith(".weight") and p.ndim > 1}
    assert decayed == matrices


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_every_parameter_has_a_finite_gradient_at_every_size(name):
    model = shrunk(name).train()
    for size in SIZES:
        model.zero_grad()
        features = model(images_for(model, size))
        rows, columns = features.grid
        height, width = legal(model, size)
        assert (rows, columns) == (-(-height // model.stride), -(-width // model.stride))
        assert features.cls.shape == (2, model.embed_dim)
        assert features.patches.shape == (2, rows * columns, model.embed_dim)
        weights_of(features).backward()
        broken = [key for key, g in gradients(model).items() if g is None or not g.isfinite().all()]
        assert not broken, (size, broken)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_below_the_smallest_size_is_refused_with_a_size_that_works(name):
    model = shrunk(name)
    small = model.min_size - 1
    message = rf"{name} takes images .*{model.min_size}"
    with pytest.raises(ValueError, match=message):
        model.check_size(small, small)
    with pytest.raises(ValueError, match=message):
        model(torch.randn(2, 3, small, model.min_size))


@pytest.mark.parametrize("name", DISTINCT)
def test_drop_path_acts_in_training_only(name):
    plain, dropping = shrunk(name), shrunk(name, drop_path=0.5)
    dropping.load_state_dict(plain.state_dict(), strict=True)
    images = images_for(plain)
    with torch.no_grad():
        assert_same(dropping.eval()(images), plain.eval()(images), rtol=0, atol=0)
        dropping.train()
        first, *others = (dropping(images).patches for _ in range(5))
    assert first.isfinite().all()
    assert not all(torch.equal(first, other) for other in others)


@torch.no_grad()
@pytest.mark.parametrize("name", DISTINCT)
def test_attention_is_a_share_per_patch_or_refused(name):
    model = shrunk(name).eval()
    images = images_for(model)
    if not model.has_attention:
        assert family(name) == "swin"
        with pytest.raises(ValueError, match=name):
            model.attention(images)
        return
    maps = model.attention(images)
    assert maps.shape == (2, SHRUNK[family(name)]["num_heads"], *model(images).grid)
    assert (maps >= 0).all()
    assert (maps.sum((-2, -1)) <= 1 + 1e-5).all()
    assert (maps.sum((-2, -1)) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", DISTINCT)
def test_the_pyramid_has_strides_4_8_16_and_32(name, learned):
    model = shrunk(name, pyramid=learned).eval()
    for size in [(64, 96), (100, 76), None]:
        images = images_for(model, size)
        height, width = images.shape[-2:]
        shapes = [tuple(level.shape[2:]) for level in model.pyramid(images)]
        assert shapes == [(-(-height // s), -(-width // s)) for s in (4, 8, 16, 32)]


@torch.no_grad()
@pytest.mark.parametrize("name", DISTINCT)
def test_state_dict_copy_and_pickle_give_the_same_network(name):
    model = shrunk(name, mask_token=True, pyramid=True, drop_path=0.1).eval()
    images = images_for(model)
    mask = torch.rand(2, *model(images).grid) < 0.5
    torch.manual_seed(1)
    other = backbones.create(name, **SHRUNK[family(name)], mask_token=True, pyramid=True).eval()
    for parameter in other.parameters():
        parameter.normal_()
    other.load_state_dict(model.state_dict(), strict=True)
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.name == name
        assert_same(twin(images, mask), model(images, mask), rtol=0, atol=0)
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_activation_checkpointing_changes_neither_gradients_nor_running_statistics(name):
    plain = shrunk(name, drop_path=0.3).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.activation_checkpointing = True
    images = images_for(plain)
    outputs = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        outputs.append(model(images))
        weights_of(outputs[-1]).backward()
    assert_same(outputs[1], outputs[0], rtol=0, atol=0)
    expected = gradients(plain)
    for key, gradient in gradients(checkpointed).items():
        torch.testing.assert_close(gradient, expected[key], rtol=0, atol=0, msg=key)
    buffers = dict(plain.named_buffers())
    for key, buffer in checkpointed.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_the_whole_graph_compiles_to_the_same_outputs(name):
    torch.compiler.reset()
    model = shallow(name).eval()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False, backend="eager")
    images = images_for(model)
    assert_same(compiled(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_compiled_it_trains_alike(name):
    torch.compiler.reset()
    model = shallow(name).train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, dynamic=False, backend="aot_eager")
    images = images_for(model)
    expected, found = model(images), compiled(images)
    assert_same(found, expected)
    weights_of(expected).backward()
    weights_of(found).backward()
    reference = gradients(model)
    for key, gradient in gradients(twin).items():
        torch.testing.assert_close(gradient, reference[key], rtol=1e-4, atol=1e-4, msg=key)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PER_FAMILY[1:])
def test_compiled_by_inductor_it_gives_the_same_outputs(name):
    torch.compiler.reset()
    model = shallow(name).eval()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False)
    images = images_for(model)
    assert_same(compiled(images), model(images), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_an_exported_program_gives_the_same_outputs(name):
    model = shallow(name).eval()
    images = images_for(model)
    program = torch.export.export(model, (images,)).module()
    other = torch.randn_like(images)
    assert_same(program(other), model(other))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_giant_p14", "xcit_small_12_p16"])
def test_an_exported_program_of_free_height_and_width_gives_the_same_outputs(name):
    """Swin's, which takes longest, is in test_swin_export.py."""
    model = shallow(name).eval()
    step = model.stride if family(name) == "vit" else 1
    side = {
        key: step * torch.export.Dim(key, min=64 // step, max=1024 // step) for key in ("height", "width")
    }
    shapes = {"images": {2: side["height"], 3: side["width"]}}
    program = torch.export.export(model, (images_for(model, (96, 160)),), dynamic_shapes=shapes).module()
    for size in [(96, 160), (130, 100), (224, 224)]:
        images = images_for(model, size)
        assert_same(program(images), model(images))
