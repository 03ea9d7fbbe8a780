"""How good are the features? Train linear classifiers on them, choose one, and test it on other images.

    python recipes/eval_linear.py runs/pretrain
    accelerate launch recipes/eval_linear.py runs/pretrain protocol=dino data.val=/images/val

Many heads learn in one pass; the best on held-out training images is tested. A run directory stands for its
best checkpoint, else its newest. What isn't given is as the run had it.
"""

from dataclasses import dataclass, field
from typing import Any

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.evaluation.linear.settings import PROTOCOLS, Linear
from nestling.ssl.evaluation.settings import Evaluation, override


@dataclass
class EvalLinear(Evaluation):
    """One evaluation."""

    protocol: str = key(
        "cached",
        "cached: SGD on features computed once; dino: on augmented images; logreg: L-BFGS on the former",
        choices=PROTOCOLS,
    )
    linear: Linear = field(default_factory=Linear)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table, writes the numbers and the chosen head into results/."""
    settings = read(
        EvalLinear, argv, program="recipes/eval_linear.py", about=__doc__ or "", positional=("checkpoint",)
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.sources.opening import opened_together
    from nestling.ssl.distributed import failing_together
    from nestling.ssl.evaluation.linear.probe import probed
    from nestling.ssl.evaluation.linear.protocols import learner_of
    from nestling.ssl.evaluation.linear.task import prepared
    from nestling.ssl.evaluation.results import results_file
    from nestling.ssl.run import processes
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    with failing_together():
        trained = load_trained(settings.checkpoint, settings.network)
        override(trained.config, "data", settings.data)
        trained.refuse_nowhere()
        if accelerator.is_main_process:
            out = results_file(trained, "linear", settings, settings.out)
    train, val = opened_together(trained.config)
    place = (accelerator.process_index, accelerator.num_processes)
    with running_out_named({"linear.images_per_pass": settings.linear.images_per_pass}):
        with failing_together():
            task = prepared(trained, train, val, settings.linear, accelerator.device, *place)
        outcome = probed(learner_of(settings.protocol, task), task)
    if accelerator.is_main_process:
        report(settings, out, task, outcome)
    accelerator.end_training()


def report(settings: EvalLinear, out: Any, task: Any, outcome: Any) -> None:
    """Write the chosen head and the numbers with all that they depend on, and print the best heads."""
    from nestling.ssl.evaluation.linear.reporting import facts_of, head_facts, show_heads
    from nestling.ssl.evaluation.linear.saved import save_head
    from nestling.ssl.evaluation.results import write_results

    head = out.with_suffix(".safetensors")
    save_head(head, outcome.weight, outcome.bias, head_facts(task, outcome))
    results = {"top1": outcome.top1, "top5": outcome.top5, "heads": outcome.heads}
    write_results(out, task.trained, settings, results, head=head.name, **facts_of(task, outcome))
    show_heads(task, outcome)


if __name__ == "__main__":
    run(main)
