"""Recipes on a SLURM cluster, through submitit (extra `slurm`).

    python -m nestling.launch.slurm --nodes 2 --gpus 8 --partition gpu dino_xcit resume=auto

Every process of the job runs the recipe with torch.distributed's variables set. A job that is
preempted or reaches its time limit is asked to stop, then queued again with the same arguments:
`resume=auto` lets it go on where it was. So it does where `train.max_hours` are over, if `resume=auto` stands
on the command line. A recipe that a signal stopped has not failed, and is not queued again.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.launch import catalog

if TYPE_CHECKING:
    import submitit

SECONDS_TO_STOP = 60  # below the 90 that submitit leaves between its signal and the end
MAX_TIMEOUTS = 1000  # submitit would give up after three time limits, and a long run takes many
TIME_IS_UP = 75  # how a recipe ends whose `train.max_hours` are over, its last step saved
STOPPED = (TIME_IS_UP, *(128 + getattr(signal, name, 0) for name in ("SIGTERM", "SIGINT", "SIGUSR1")))


class RecipeJob:
    """One process of a job; pickled by submitit, so it holds nothing but text.

    Raises:
        RuntimeError: the recipe failed, which marks the job as failed.
    """

    def __init__(self, script: Path, arguments: Sequence[str]) -> None:
        self.command = [sys.executable, str(script), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        """Run the recipe; returns why it stopped before its end, or nothing."""
        # Some clusters send submitit's signal to every process of a step; it's for this one alone.
        preemption = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
        handler = signal.signal(preemption, signal.SIG_IGN)  # inherited by the recipe
        self.process = subprocess.Popen(self.command, env={**os.environ, **distributed_variables()})
        signal.signal(preemption, handler)
        while self.process.poll() is None:  # not wait(): checkpoint() interrupts this and waits itself
            time.sleep(0.1)
        code, script = self.process.returncode, self.command[1]
        if code and code not in STOPPED:
            raise RuntimeError(f"{script} ended with exit code {code}")
        if code == TIME_IS_UP and "resume=auto" in self.command:
            signal.raise_signal(preemption)  # submitit's way to the queue, which the first process takes
        return f"{script} stopped with exit code {code}; submit it with resume=auto to go on" if code else ""

    def checkpoint(self) -> Any:
        """Called by submitit before it queues the job again."""
        import submitit

        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return submitit.helpers.DelayedSubmission(RecipeJob(Path(self.command[1]), self.command[2:]))


def distributed_variables() -> dict[str, str]:
    """What torch.distributed reads, from the job's own; nothing for a single process."""
    import submitit

    job = submitit.JobEnvironment()
    if job.num_tasks == 1:
        return {}
    peers = submitit.helpers.TorchDistributedEnvironment()
    return {
        "MASTER_ADDR": peers.master_addr,
        "MASTER_PORT": str(peers.master_port),
        "RANK": str(peers.rank),
        "WORLD_SIZE": str(peers.world_size),
        "LOCAL_RANK": str(peers.local_rank),
        "LOCAL_WORLD_SIZE": str(peers.local_world_size),
    }


def parser() -> argparse.ArgumentParser:
    """Options come before the recipe; all that follows it is the recipe's."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.launch.slurm",
        description="Run a recipe on a SLURM cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per machine (default 8), 0 for none")
    parser.add_argument("--processes", type=int, help="processes per machine; default: one per GPU, or one")
    parser.add_argument("--cpus", type=int, default=8, help="CPU cores per process (default 8)")
    parser.add_argument("--hours", type=float, default=24, help="time limit of the job (default 24)")
    parser.add_argument("--partition", help="SLURM partition; default: the cluster's own")
    parser.add_argument("--name", default="nestling", help="name of the job")
    parser.add_argument("--folder", default="runs/slurm", help="where logs of jobs go (default runs/slurm)")
    parser.add_argument(
        "--wait", action="store_true", help="return at its end: 1 if it failed, 75 if stopped"
    )
    parser.add_argument(
        "--cluster", choices=("slurm", "local"), default="slurm", help="local: on this machine, no SLURM"
    )
    parser.add_argument("recipe", help="a recipe's name, or the path of a script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the recipe's own key=value")
    return parser


def submit(options: argparse.Namespace) -> "submitit.Job[str]":
    """Queue the job that the options describe.

    Raises:
        ValueError: no such recipe, or submitit isn't installed.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ValueError("submitit is not installed: pip install 'nestling[slurm]'") from error

    job = RecipeJob(catalog.find(options.recipe), options.arguments)
    executor = submitit.AutoExecutor(
        folder=Path(options.folder) / "%j", cluster=options.cluster, slurm_max_num_timeout=MAX_TIMEOUTS
    )
    executor.update_parameters(
        name=options.name,
        nodes=options.nodes,
        tasks_per_node=options.processes or max(options.gpus, 1),
        gpus_per_node=options.gpus,
        cpus_per_task=options.cpus,
        timeout_min=max(1, round(60 * options.hours)),
        **({"slurm_partition": options.partition} if options.partition else {}),
    )
    return executor.submit(job)


def main(argv: Sequence[str] | None = None) -> int:
    """Submit, say where the logs go, and wait if asked to; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        job = submit(options)
    except (ValueError, RuntimeError) as mistake:  # RuntimeError: submitit finds no SLURM here
        print(f"nestling.launch.slurm: {mistake}", file=sys.stderr)
        return 2
    print(f"job {job.job_id}, logs in {job.paths.folder}", flush=True)
    if not options.wait:
        return 0
    error = job.exception()
    if error is not None:
        print(f"nestling.launch.slurm: {error}", file=sys.stderr)
        return 1
    stops = [stop for stop in job.results() if stop]
    if stops:
        print(f"nestling.launch.slurm: {stops[0]}", file=sys.stderr)
    return TIME_IS_UP if stops else 0


if __name__ == "__main__":
    sys.exit(main())
