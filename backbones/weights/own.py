"""Our own runs and exports: safetensors whose metadata names the network.

{"nestling": '{"backbone": {"name": "xcit_small_12_p16", "options": {"in_chans": 3}}}'}
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nestling.backbones.registry import names

KEY = "nestling"


class Description(NamedTuple):
    """A backbone's name, the options it was built with, and whether the file is an export."""

    name: str
    options: dict[str, Any]
    is_export: bool


def describe(metadata: dict[str, str], file: str) -> Description | None:
    """What the metadata says, or None where they are not ours.

    Raises ValueError where they are ours and damaged.
    """
    if KEY not in metadata:
        return None
    try:
        facts = json.loads(metadata[KEY])
        backbone = facts["backbone"]
        return Description(str(backbone["name"]), dict(backbone["options"]), "network" in facts)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: its metadata {KEY!r} do not name a backbone ({error!r})") from error


def split_heads(
    tensors: Mapping[str, Tensor], description: Description
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The backbone's tensors under its own keys, and the keys beside it.

    A checkpoint holds `backbone.` and `head.` and nothing else; exactly that one `backbone.` goes, as a
    network of the user's may have parts of any name.
    """
    prefix = "backbone."
    is_checkpoint = not description.is_export and all(key.startswith((prefix, "head.")) for key in tensors)
    if not is_checkpoint:
        return dict(tensors), ()
    inside = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return inside, tuple(key for key in tensors if not key.startswith(prefix))


def check_name(found: str, asked: str | None, file: str) -> None:
    """Raise ValueError where the user asked for another network than the file names.

    Also where building it would import a module that the file alone chose: a file is no reason to run
    code, so such a name has to come from the user too.
    """
    if asked not in (None, found):
        raise ValueError(f"{file} holds {found}, not {asked}")
    if asked is None and found not in names() and not found.startswith(("timm:", "torchvision:")):
        raise ValueError(
            f"{file} holds {found}, which is code outside nestling; say name={found!r} to import it"
        )
