"""Other people's networks behind the contract: `timm:NAME`, `torchvision:NAME`, `my.module:Name`.

Their libraries are imported when such a name is built, never before.
"""

from typing import Any

from nestling.backbones.features import Backbone

FORMS = "timm:NAME, torchvision:NAME and my.module:ClassName"


def is_adapted(name: str) -> bool:
    """Whether a name has the form of an adapter's: a prefix, or a dotted path."""
    return ":" in name or "." in name


def adapt(name: str, options: dict[str, Any]) -> Backbone:
    """Build it. Raises ValueError where there is no such network or it breaks the contract."""
    prefix, _, inner = name.partition(":")
    if prefix == "timm":
        from nestling.backbones.adapters.timm import Timm

        return Timm(name, inner, **options)
    if prefix == "torchvision":
        from nestling.backbones.adapters.torchvision import Torchvision

        return Torchvision(name, inner, **options)
    from nestling.backbones.adapters.custom import build

    return build(name, options)
