"""The commands that README and docs show, by what they start, for the tests that run them."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("accelerate", "make", "nestling", "pip", "python", "torchrun")


def commands() -> Iterator[str]:
    """The command lines of all fenced blocks without a language, without comments and ellipses."""
    for page in PAGES:
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            for line in block.splitlines() if not language else ():
                command = line.partition(" #")[0].replace("…", "").strip()
                if command.split(" ")[0] in PROGRAMS:
                    yield command


def once(commands: Iterable[str]) -> list[str]:
    """One of each that are the same here, where all runs and all images are the fixture's."""
    return list(
        {re.sub(r" data\.train=\S+|(?<= runs/)\w+", "", command): command for command in commands}.values()
    )


SHOWN = sorted(set(commands()))
HELP = [command for command in SHOWN if command.endswith("--help")]


def starting(*parts: str) -> list[str]:
    """Those that hold one of the parts, but for calls of --help."""
    return [command for command in SHOWN if any(part in command for part in parts) and command not in HELP]


MAKE, PIP = ([command for command in SHOWN if command.split()[0] == program] for program in ("make", "pip"))
SLURM = starting("nestling.launch.slurm")
EVAL, SIZES, UNLABELLED = (starting(f"eval_{name}.py") for name in ("knn", "resolution", "unlabelled"))
EXPORT, MEASURE = starting("recipes/export.py"), starting("measure_data")
FINETUNE, DETECTION = starting("recipes/finetune.py"), starting("recipes/finetune_detection.py")
FEATURES = starting("recipes/extract_features.py", "recipes/search.py")
LINEAR, BENCHMARKS = starting("recipes/eval_linear.py"), starting("benchmarks/")
SMALL = {  # what makes each small
    "eval_segmentation": "size=16 linear.steps=3 linear.warmup_steps=1 linear.batch_size=2",
    "eval_video": "size=64",
    "eval_retrieval": "size=32",
    "eval_copy_detection": "size=32",
}
DENSE = [(command, small) for name, small in SMALL.items() for command in starting(f"recipes/{name}.py")]
OTHER = ["nestling"]
PRETRAIN = sorted(
    {*SHOWN}
    - {*MAKE, *PIP, *SLURM, *HELP, *EVAL, *SIZES, *UNLABELLED, *EXPORT, *MEASURE, *FINETUNE, *DETECTION}
    - {*FEATURES, *LINEAR, *BENCHMARKS, *OTHER, *(command for command, _ in DENSE)}
)
(FIRST,) = once(
    re.findall(r"^accelerate launch recipes/dino_xcit\.py(?: data\.train=\S+)?$", "\n".join(PRETRAIN), re.M)
)
