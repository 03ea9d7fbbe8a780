"""Where a fine-tuning stands after an epoch, in one file that is whole or as it was before."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run.disk import draft_of, replaced

FILE = "state.pt"
FREE = ("out", "resume", "data.num_workers", "data.on_error", "data.max_bad_share", "data.root", "data.cache")


@dataclass
class State:
    """What goes on from one epoch to the next; `history` has a record for each finished epoch.

    `settings` are flat and plain: under other ones nothing goes on.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return len(self.history)

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        """Write it. Raises UserError where it can't be written."""
        scaler = accelerator.scaler
        content = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "history": self.history,
            "settings": self.settings,
        }
        with replaced(folder / FILE) as draft, draft.open("wb") as file:
            torch.save(content, file)  # of a path torch would tell no reason of a failure

    def restore(self, folder: Path, accelerator: Accelerator) -> None:
        """Go on from what the folder holds, if anything.

        Raises:
            UserError: it is damaged, or began under other settings.
        """
        file = folder / FILE
        if not file.is_file():
            return
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{printable(file)} can't be read ({error}); delete it to begin anew") from error
        _refuse_changes(content["settings"], self.settings, folder)
        self.network.load_state_dict(content["network"])
        self.optimizer.load_state_dict(content["optimizer"])
        if accelerator.scaler is not None and content["scaler"] is not None:
            accelerator.scaler.load_state_dict(content["scaler"])
        self.history = content["history"]


def claimed(out: str, resume: str) -> Path:
    """The folder of a fine-tuning, made where it isn't there.

    Raises:
        UserError: it holds something already and may not go on, or it can't be made.
    """
    folder = Path(out).expanduser()
    try:
        file = folder / FILE  # the draft of a first save that was killed is nothing to keep
        held = folder.is_dir() and any(path != draft_of(file) for path in folder.iterdir())
        if held and not file.is_file():
            raise UserError(f"out={printable(out)} holds files that are no fine-tuning; name a new folder")
        if held and resume == "never":
            raise UserError(f"out={printable(out)} holds a fine-tuning; resume=auto goes on with it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={printable(out)} can't be used: {error.strerror}") from error
    return folder


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to plain value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.loads(json.dumps(value))
    return found


def _refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    for key in sorted(old.keys() | new.keys()):
        if key not in FREE and old.get(key) != new.get(key):
            raise UserError(
                f"the fine-tuning in out={printable(folder)} began with {key}={old.get(key)}, now it is "
                f"{new.get(key)}: give the old value to continue it, or another out for a new one"
            )
