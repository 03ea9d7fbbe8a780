"""Loading tensors into a backbone that exists, key by key."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from nestling.backbones.features import Backbone
from nestling.backbones.position_table import resize_positions
from nestling.backbones.vit import ViT
from nestling.backbones.weights.layout import grid_side
from nestling.backbones.weights.report import Report, shorten

STEMS = ("patch_embed.proj.weight", "patch_embed.proj.0.0.weight")
TABLES = {"pos_embed": 1, "absolute_pos_embed": 0}  # a table, and its entries before the grid's

# Tensors of these names act inside a network: leaving them out would change the features unseen.
_INNER = (
    *("cls_token", "dist_token", "register_tokens", "reg_token", "storage_tokens"),
    *("pos_embed", "absolute_pos_embed", "pos_embeder", "rel_pos_bias", "rope_embed", "norm_pre"),
)


def fit(
    backbone: Backbone,
    tensors: Mapping[str, Tensor],
    allow_partial: Sequence[str] = (),
    adapt: bool = True,
    *,
    layout: str = "tensors",
    network: str | None = None,
    left_out: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Load tensors under our keys into `backbone`, all of them or none.

    With `adapt` the first convolution follows the backbone's number of input channels: summed over the
    channels for one, else repeated in turn and scaled by old / new, so that activations keep their size;
    and a position table is resized to the backbone's as a ViT would read it at that size, by its own
    `interpolate_*`. Both are noted in the report.
    `allow_partial` names, as patterns like `blocks.11.*`, what may be missing, of another shape, or not
    in the backbone. The last four arguments go into the report.

    Raises ValueError where a tensor of the backbone isn't matched, is not finite or holds integers for
    fractions, where the tensors hold a part that the backbone lacks, or where a pattern matches no key.
    """
    allow_partial = (allow_partial,) if isinstance(allow_partial, str) else allow_partial
    wanted, found, said = backbone.state_dict(), dict(tensors), list(notes)
    if adapt:
        rule = (backbone.offset, backbone.antialias) if isinstance(backbone, ViT) else (0.0, False)
        said += _adapt(found, wanted, rule)
    missing = [key for key in wanted if key not in found]
    misshapen = {
        key: (tuple(found[key].shape), tuple(value.shape))
        for key, value in wanted.items()
        if key in found and found[key].shape != value.shape
    }
    unexpected = [key for key in found if key not in wanted]
    matched = [key for key in wanted if key in found and key not in misshapen]
    report = Report(
        layout, network, tuple(matched), tuple(missing), (*unexpected, *left_out), misshapen, tuple(said)
    )
    _check(backbone.name, report, unexpected, wanted, allow_partial)
    for key in matched:
        _check_numbers(key, found[key], wanted[key])
    backbone.load_state_dict({key: found[key] for key in matched}, strict=False)
    return report


def _check(
    name: str,
    report: Report,
    unexpected: list[str],
    wanted: Mapping[str, Tensor],
    allow_partial: Sequence[str],
) -> None:
    known = [*wanted, *unexpected]
    for pattern in allow_partial:
        if not any(fnmatchcase(key, pattern) for key in known):
            raise ValueError(f"allow_partial={pattern!r} matches no key of {name}, such as {known[0]}")

    def refused(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if not any(fnmatchcase(key, pattern) for pattern in allow_partial)]

    parts = {key.partition(".")[0] for key in wanted} | set(_INNER)
    inner = refused([key for key in unexpected if key.partition(".")[0] in parts])
    problems = []
    if missing := refused(report.missing):
        problems.append(f"missing are {shorten(missing)}")
    for key in refused(list(report.misshapen)):
        found, shape = report.misshapen[key]
        problems.append(f"{key} is {found} in the file and {shape} in the backbone")
    if inner:
        problems.append(f"the backbone has no {shorten(inner)}")
    if problems:
        listed = "; ".join(problems[:6]) + ("; and so on" if len(problems) > 6 else "")
        raise ValueError(
            f"the weights ({report.layout}) do not fit {name}, {len(report.matched)} of {len(wanted)} "
            f"tensors match: {listed}; allow_partial=(...) names keys that may differ"
        )


def _check_numbers(key: str, found: Tensor, wanted: Tensor) -> None:
    if not wanted.is_floating_point():  # a counter of the running statistics
        return
    if not found.is_floating_point() or found.dtype.itemsize == 1:  # float8 means nothing without its scale
        raise ValueError(f"{key} holds {found.dtype}, not numbers in 16 bits or more; are they quantised?")
    if not found.isfinite().all():
        raise ValueError(
            f"{key} holds nan or infinity, so these weights are damaged or their training diverged"
        )


def _adapt(found: dict[str, Tensor], wanted: Mapping[str, Tensor], rule: tuple[float, bool]) -> list[str]:
    """Adapt the stem and, by a `rule` of offset and antialias, the position table in place.

    Returns what was done.
    """
    notes = []
    for key in STEMS:
        if key in found and key in wanted:
            old, new = found[key].shape, wanted[key].shape
            if len(old) == len(new) == 4 and old[1] != new[1] and old[0] == new[0] and old[2:] == new[2:]:
                found[key] = adapt_stem(found[key], new[1])
                notes.append(f"adapted: {key} from {old[1]} to {new[1]} input channels")
    for key, prefix in TABLES.items():
        if key in found and key in wanted:
            rows, target = found[key].shape[1], wanted[key].shape[1]
            if rows != target and found[key].shape[-1] == wanted[key].shape[-1]:
                found[key] = resize_table(found[key], target - prefix, prefix, *rule)
                sides = grid_side(rows - prefix, key), grid_side(target - prefix, key)
                notes.append(
                    f"adapted: {key} from {sides[0]} x {sides[0]} to {sides[1]} x {sides[1]} patches"
                )
    return notes


def adapt_stem(weight: Tensor, in_chans: int) -> Tensor:
    """The first convolution for another number of input channels.

    One channel: the sum over the old ones, so that a gray image gives what its three equal channels
    gave. More: the old ones repeated in turn, scaled by old / new.

    Shape:
        weight: (D, c, k, k) -> (D, in_chans, k, k)
    """
    old = weight.shape[1]
    if in_chans == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, torch.arange(in_chans) % old] * (old / in_chans)


def resize_table(
    table: Tensor, num: int, prefix: int, offset: float = 0.0, antialias: bool = False
) -> Tensor:
    """A position table for a square grid of `num` patches, its first `prefix` entries kept.

    Shape:
        table: (1, prefix + S * S, C) -> (1, prefix + num, C)
    """
    grid_side(table.shape[1] - prefix, "the position table")  # refuses what is no square
    new = grid_side(num, "the backbone's position table")
    patches = resize_positions(table[0, prefix:], (new, new), offset, antialias)
    return torch.cat([table[:, :prefix], patches[None]], dim=1)
