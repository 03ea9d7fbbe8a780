"""Import root; in a checkout its parts are the top-level folders ssl/, backbones/, recipes/, launch/."""

from pathlib import Path

__version__ = "0.1.0"

_here = Path(__file__).parent
if not (_here / "ssl").is_dir():  # a checkout; in a wheel the parts lie beside this file
    __path__.append(str(_here.parent))
