"""What the pretraining recipes share: which config is meant, then the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nestling.ssl.command_line import read
from nestling.ssl.config import Config

EMBEDDED = "photo-tiles"


def pretraining_config(
    argv: Sequence[str], script: str, about: str, *, published: str, demo: str | None = None
) -> Config:
    """The config that a pretraining recipe's command line means.

    Without `--config` it is the YAML `published`, or, where there is one and no other images are named,
    `demo`: the embedded set, made for minutes on a laptop. Both lie in `configs/` beside the script.

    Raises:
        UserError: one sentence about the first mistake found.
    """

    def default(settings: Mapping[str, str]) -> str:
        embedded = settings.get("data.train", EMBEDDED) == EMBEDDED
        return demo if demo and embedded else published

    path = Path(script)
    return read(
        Config,
        argv,
        program=f"recipes/{path.name}",
        about=about,
        configs=path.parent / "configs",
        default=default,
    )
