"""What a probe says: on screen, in the JSON, and in the metadata of its head."""

from typing import Any

from nestling.ssl.evaluation.linear.probe import Outcome
from nestling.ssl.evaluation.linear.task import Task
from nestling.ssl.evaluation.results import show_table

BEFORE = ", before it learned from all"
ROWS = 10  # heads on screen; the JSON has all of them


def show_heads(task: Task, outcome: Outcome) -> None:
    """The chosen head with its test accuracy, below it the best of the grid as they were chosen from."""
    setting = outcome.chosen.setting
    listed = [head for head in outcome.heads if not head["dropped"]]
    by = "test_top1" if listed[0]["held_out_top1"] is None else "held_out_top1"
    best = sorted(listed, key=lambda head: -head[by])[:ROWS]
    counts = f"{len(outcome.heads)} heads" + (
        f", {len(outcome.facts['dropped'])} of them NaN" if outcome.facts["dropped"] else ""
    )
    show_table(
        f"Linear probe of the {task.trained.title}: the best of {counts}",
        (
            "features",
            setting,
            "held-out top-1 %",
            f"test top-1 %{BEFORE if outcome.facts['refit_on_all'] else ''}",
        ),
        (
            (head["readout"], f"{head[setting]:g}", _cell(head["held_out_top1"]), head["test_top1"])
            for head in best
        ),
    )
    five = "" if outcome.top5 is None else f", top-5 {100 * outcome.top5:.1f} %"
    print(
        f"test: top-1 {100 * outcome.top1:.1f} %{five} on {outcome.facts['num_test']} images, "
        f"by {outcome.chosen}"
    )
    print(f"chosen on {outcome.chosen_on}")


def _cell(share: float | None) -> float | str:
    return "–" if share is None else share


def facts_of(task: Task, outcome: Outcome) -> dict[str, Any]:
    """What the numbers depend on besides the settings and the weights."""
    names = task.class_names
    return {
        "chosen": {
            "readout": outcome.chosen.readout,
            outcome.chosen.setting: outcome.chosen.value,
            "on": outcome.chosen_on,
        },
        "data": {"train": task.train.name, "val": task.val.name},
        **outcome.facts,
        "num_classes": len(names),
        "num_of_unknown_classes": task.num_unknown,
        "unreadable": task.ledger.paths(),
        "size": task.view.size[0],
        "crop_ratio": task.view.crop_ratio,
    }


def head_facts(task: Task, outcome: Outcome) -> dict[str, Any]:
    """What a head needs to be used: the metadata of its file."""
    return {
        **task.trained.facts(),
        "readout": outcome.chosen.readout,
        "class_names": task.class_names,
        "size": task.view.size[0],
        "crop_ratio": task.view.crop_ratio,
        "top1": outcome.top1,
    }
