"""The console script: `nestling RECIPE key=value …` runs a recipe on all visible GPUs, or else on the CPU.

usage:
  nestling                                     list the recipes
  nestling RECIPE [key=value …]                run one; --help after the name lists its keys
  nestling RECIPE --processes N [key=value …]  on N processes (GPUs, or CPU processes where there is none)
  nestling RECIPE --cpu [key=value …]          leave the GPUs alone; one process unless --processes says more
  nestling RECIPE --path                       print where the script lies, for a launcher of your own

RECIPE is a name of the list or the path of a script of your own. For machines without a shared
launcher, FSDP and the like: accelerate launch --config_file FILE "$(nestling RECIPE --path)" key=value …
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import nestling
from nestling.launch import catalog

USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence, as the recipes do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def overview() -> str:
    """Usage, then one line per recipe."""
    paths = catalog.recipe_paths()
    width = max(map(len, paths), default=0)
    lines = [f"  {name:{width}}  {catalog.summary(path)}" for name, path in paths.items()]
    return "\n".join([(__doc__ or "").strip(), "", "recipes:", *lines])


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, wherever they stand; all else is the recipe's, in its order.

    Raises:
        ValueError: an option's value is not legal.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--path", action="store_true")
    options, rest = parser.parse_known_args(argv)
    if options.processes is not None and options.processes < 1:
        raise ValueError(f"--processes {options.processes}: at least 1 is needed")
    return options, rest


def num_processes(asked: int | None, num_gpus: int) -> int:
    """One process per GPU by default, one at all without GPUs.

    Raises:
        ValueError: more processes than GPUs.
    """
    if asked is None:
        return max(num_gpus, 1)
    if num_gpus and asked > num_gpus:
        raise ValueError(
            f"--processes {asked}: only {num_gpus} GPUs are visible; ask for at most {num_gpus} or add --cpu"
        )
    return asked


def run_alone(command: list[str]) -> int:
    """Become the recipe: exit code, signals and terminal are its own, with no launcher between."""
    if os.name != "nt":  # there, exec returns to the shell at once
        sys.stdout.flush()
        os.execv(command[0], command)
    return subprocess.call(command)


def run_many(script: Path, arguments: list[str], processes: int, on_gpus: bool) -> int:
    """Start several processes on this machine; a signal reaches all, and the first failure's code is ours.

    `accelerate launch` starts one process however many it is asked for where there is no GPU
    (it leaves that to MPI), so CPU processes come from torchrun, which it uses for GPUs as well.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # both launchers else say 1, with a warning
    try:
        if on_gpus:
            from accelerate.commands.launch import launch_command, launch_command_parser

            flags = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
            flags += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
            launch_command(launch_command_parser().parse_args([*flags, str(script), *arguments]))
        else:
            from torch.distributed import run as torchrun

            flags = ["--standalone", "--nproc_per_node", str(processes)]
            torchrun.run(torchrun.get_args_parser().parse_args([*flags, str(script), *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_code(failure.exitcode)
    except SignalException as error:
        return shell_code(-int(error.sigval))
    return 0


def shell_code(code: int) -> int:
    """A death by signal n, which Python calls -n, is 128 + n to a shell."""
    return 128 - code if code < 0 else code


def run(script: Path, arguments: list[str], asked: int | None, cpu: bool) -> int:
    """Run a recipe and return its exit code."""
    import torch

    if cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    num_gpus = 0 if cpu else torch.cuda.device_count()
    if not num_gpus:  # else waiting threads spin for long and take the cores from other programs
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    processes = num_processes(asked, num_gpus)
    if processes == 1:
        return run_alone([sys.executable, str(script), *arguments])
    return run_many(script, arguments, processes, on_gpus=num_gpus > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        print(nestling.__version__)
        return 0
    try:
        options, rest = parse(argv)
        if not rest or rest[0].startswith("-"):
            raise ValueError(f"{rest[0] if rest else argv[0]} names no recipe; nestling --help lists them")
        script = catalog.find(rest[0])
        if options.path:
            print(script)
            return 0
        return run(script, rest[1:], options.processes, options.cpu)
    except ValueError as mistake:
        print(f"nestling: {mistake}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
