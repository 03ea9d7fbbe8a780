"""Image backbones behind one contract (`Features`), built by name: `create("xcit_small_12_p16")`.

Everything here imports torch alone. A family is one file: importing it below registers its names.
"""

from nestling.backbones import swin as _swin  # noqa: F401  (registers the family's names)
from nestling.backbones import vit as _vit  # noqa: F401  (registers the family's names)
from nestling.backbones import xcit as _xcit  # noqa: F401  (registers the family's names)
from nestling.backbones.features import Backbone, Features
from nestling.backbones.registry import create, names
from nestling.backbones.weights import Loaded, load

__all__ = ["Backbone", "Features", "Loaded", "create", "load", "names"]
