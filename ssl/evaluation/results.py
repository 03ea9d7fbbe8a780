"""Where an evaluation leaves its results, and what they say besides numbers: all it takes to repeat them."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nestling.ssl.names import printable
from nestling.ssl.run.directory import environment, writable, write_json
from nestling.ssl.trained import Trained

FOLDER = "results"


def results_file(trained: Trained, evaluation: str, settings: Any, out: str | None = None) -> Path:
    """`out`, else results/EVALUATION_STEP_NETWORK.json in the run directory, or beside a weights file.

    Results of the same settings are replaced; those of other settings stay, and a number is added.

    Raises:
        UserError: it can't be written there.
    """
    if out is not None:
        return writable(Path(out))
    if trained.checkpoint is None:
        folder, name = trained.file.parent / FOLDER, f"{evaluation}_{trained.file.stem}"
    else:
        folder = run_of(trained.checkpoint) / FOLDER
        name = f"{evaluation}_{trained.checkpoint.name}_{trained.network}"
    number, wanted = 1, json.loads(json.dumps(asdict(settings)))
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        if not path.exists() or _settings_in(path) == wanted:
            return writable(path)
        number += 1


def run_of(checkpoint: Path) -> Path:
    """The run that a checkpoint lies in; a copy of a checkpoint alone is its own."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def _settings_in(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("settings")
    except (OSError, ValueError, AttributeError):
        return None


def write_results(path: Path, trained: Trained, settings: Any, results: Any, **facts: Any) -> None:
    """Write `results` with the weights' hash, the settings as given, the versions and further `facts`."""
    write_json(
        path,
        {
            "command": sys.argv,
            "settings": asdict(settings),
            **trained.facts(),
            **facts,
            "results": results,
            "environment": environment(),
        },
    )
    print(f"written to {printable(path)}")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on screen: text as it is, shares (floats) in percent with one digit."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{100 * cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
