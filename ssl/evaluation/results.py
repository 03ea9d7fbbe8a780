"""Where an evaluation leaves its results, and what they say besides numbers: all it takes to repeat them."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestling.ssl.distributed import num_processes
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run.directory import environment, writable, write_json
from nestling.ssl.trained import Trained

FOLDER = "results"
USED = ("data", "knn", "views")  # sections of a run's config that an evaluation reads


def results_file(trained: Trained, evaluation: str, settings: Any, out: str | None = None) -> Path:
    """`out`, else results/EVALUATION_STEP_NETWORK.json in the run directory, or beside a weights file.

    Results of the same settings are replaced; those of other settings stay, and a number is added.

    Raises:
        UserError: `out` has another ending, or it can't be written there.
    """
    if out is not None:
        # What else is written lies beside it under the same name with another ending, or with none.
        if Path(out).suffix.lower() != ".json":
            raise UserError(f"out={printable(out)} names the file of the results: end it in .json")
        return writable(Path(out).expanduser())
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


def used_config(trained: Trained) -> dict[str, Any]:
    """What of its config an evaluation depends on, after all that was given in place of it."""
    config = trained.config
    return {**{name: asdict(getattr(config, name)) for name in USED}, "seed": config.seed}


def write_results(path: Path, trained: Trained, settings: Any, results: Any, **facts: Any) -> None:
    """Write `results` with the weights' hash, the settings as given, the config and number of processes as
    used, the working directory that paths are relative to, the versions, and further `facts`."""
    write_json(
        path,
        {
            "command": sys.argv,
            "cwd": str(Path.cwd()),
            "settings": asdict(settings),
            "config": used_config(trained),
            "num_processes": num_processes(),
            **trained.facts(),
            **facts,
            "results": results,
            "environment": environment(),
        },
    )
    print(f"written to {printable(path)}")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on screen: text as it is, shares (floats) in percent with one digit.

    The title is a line of its own that no narrow terminal breaks within a path.
    """
    table = Table()
    for column in columns:
        table.add_column(_shown(column))
    for row in rows:
        table.add_row(*(_shown(cell) for cell in row))
    print(printable(title))
    Console().print(table)


def _shown(cell: Any) -> Text:
    """Never as markup: a class may be called [/car]."""
    return Text(f"{100 * cell:.1f}" if isinstance(cell, float) else printable(str(cell)))
