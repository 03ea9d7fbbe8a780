"""The terms by name: a method is a list of terms with weights in a YAML."""

from torch import nn

from nestling.ssl.config import Config
from nestling.ssl.terms.dino import DinoTerm
from nestling.ssl.terms.term import Outputs, Term

NAMES = ("dino",)

__all__ = ["NAMES", "Outputs", "Term", "build"]


def build(config: Config) -> nn.ModuleDict:
    """The terms of `config.terms` whose weight is not zero."""
    makers = {
        "dino": lambda: DinoTerm(
            config.head.num_prototypes, config.head.temperature, config.teacher.center_momentum
        )
    }
    return nn.ModuleDict({name: makers[name]() for name, weight in config.terms.items() if weight})
