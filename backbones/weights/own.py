"""Our own runs and exports: safetensors whose metadata names the network.

{"nestling": '{"backbone": {"name": "xcit_small_12_p16", "options": {"in_chans": 3}}}'}
"""

import json
from typing import Any, NamedTuple

from nestling.backbones.registry import names

KEY = "nestling"


class Description(NamedTuple):
    """A backbone's registered name and the options it was built with."""

    name: str
    options: dict[str, Any]


def describe(metadata: dict[str, str], file: str) -> Description | None:
    """What the metadata says, or None where they are not ours.

    Raises ValueError where they are ours and damaged.
    """
    if KEY not in metadata:
        return None
    try:
        backbone = json.loads(metadata[KEY])["backbone"]
        return Description(str(backbone["name"]), dict(backbone["options"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: its metadata {KEY!r} do not name a backbone ({error!r})") from error


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
