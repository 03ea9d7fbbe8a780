"""What the pretraining recipes share: which config is meant, then the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nestling.ssl.command_line import read
from nestling.ssl.config import Config

EMBEDDED = "photo-tiles"


def pretraining_config(argv: Sequence[str], script: str, about: str, *, demo: str, published: str) -> Config:
    """The config that a pretraining recipe's command line means.

    Without `--config` it is the YAML `demo` for the embedded set, made for minutes on a laptop, and
    `published` for images of one's own. Both lie in `configs/` beside the script.

    Raises:
        UserError: one sentence about the first mistake found.
    """

    def default(settings: Mapping[str, str]) -> str:
        return demo if settings.get("data.train", EMBEDDED) == EMBEDDED else published

    path = Path(script)
    return read(
        Config,
        argv,
        program=f"recipes/{path.name}",
        about=about,
        configs=path.parent / "configs",
        default=default,
    )
