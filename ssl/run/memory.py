"""Memory: how much this process may still take, and what to lower where it ran out."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from nestling.ssl.config import AUTO, Config
from nestling.ssl.distributed import processes_here
from nestling.ssl.errors import UserError
from nestling.ssl.keys import show
from nestling.ssl.run.disk import size
from nestling.ssl.run.processes import resolved_precision

try:
    import resource
except ImportError:  # Windows, whose memory `room` doesn't tell either
    resource = None  # type: ignore[assignment]

# What torch and the libraries below it say, where they raise a plain RuntimeError.
TOLD = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|ALLOC_FAILED", re.I)
ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.I)

FOR_THREADS = 512 * 2**20  # addresses that the stacks and heaps of a run's threads take without filling them

STATUS = Path("/proc/self/status")
RESET_PEAK = Path("/proc/self/clear_refs"), "5"  # proc(5)
CGROUPS = (  # version 2 and 1: root, limit, use, and what of that is cached files that can go
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and TOLD.search(str(error)) is not None


@contextmanager
def running_out_explained(config: Config, phase: str) -> Iterator[None]:
    """Say in one sentence that memory ran out and what to lower; `phase` is a key of `ADVICE`.

    Raises:
        UserError: in the place of any error that `is_out_of_memory`.
    """
    with _told(f" {phase}", lambda: ADVICE[phase](config)):
        yield


@contextmanager
def running_out_named(numbers: Mapping[str, int]) -> Iterator[None]:
    """As `running_out_explained`, for a recipe where these keys of its own say how much is held at once.

    Outside of `failing_together`, as the other processes may be anywhere when one runs out.

    Raises:
        UserError: in the place of any error that `is_out_of_memory`.
    """
    lower = " or ".join(f"{key}={value // 2}" for key, value in numbers.items() if value > 1)
    advice = f"give {lower}, smaller images" if lower else "give smaller images"
    with _told("", lambda: f"{advice} or a smaller network"):
        yield


@contextmanager
def _told(phase: str, advice: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"memory ran out{phase}{_asked(error)}: {advice()}") from error


def _asked(error: Exception) -> str:
    asked = ASKED.search(str(error))
    return f" (it asked for {_readable(asked[1])} more)" if asked else ""


def _readable(amount: str) -> str:
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", amount).groups()  # type: ignore[union-attr]
    return size(float(number)) if unit == "bytes" else amount


def advice_at_the_start(config: Config) -> str:
    """What makes the networks themselves smaller."""
    return (
        f"student, teacher and gradients of backbone.name={config.backbone.name} with "
        f"head.num_prototypes={config.head.num_prototypes} must fit: name a smaller backbone, lower "
        "head.num_prototypes, or end what else uses the memory"
    )


def advice_in_training(config: Config) -> str:
    """What lowers the memory of a step: first what changes least of what is learned."""
    train, views = config.train, config.views
    first = []
    if train.batch_size > 1 and train.batch_size != AUTO:
        part = next(part for part in range(train.batch_size // 2, 0, -1) if train.batch_size % part == 0)
        more = train.accumulation * (train.batch_size // part)
        first.append(
            f"train.batch_size={part} train.accumulation={more} in the place of {train.batch_size} and "
            f"{train.accumulation} (the same global batch)"
        )
    if not train.activation_checkpointing:
        first.append("train.activation_checkpointing=true")
    fewer = [f"views.num_local={views.num_local}"] if views.num_local else []
    fewer.append(f"views.global_size={show(views.global_size)}")
    fewer += [f"views.local_size={show(views.local_size)}"] if views.num_local else []
    said = f"give {', or '.join(first)}, then resume=auto goes on; " if first else ""
    precision = " and train.precision=bf16" if resolved_precision(train.precision) == "fp32" else ""
    return f"{said}in a new run a lower {', '.join(fewer)}{precision} also help{'' if precision else 's'}"


def advice_in_evaluation(config: Config) -> str:
    """What lowers the memory of k-NN."""
    side = config.knn.size or max(config.views.global_size)
    lower = f"knn.batch_size={config.knn.batch_size // 2} or " if config.knn.batch_size > 1 else ""
    return f"give {lower}a knn.size below {side}"


AT_THE_START, IN_TRAINING, IN_EVALUATION = "before the first step", "in training", "in evaluation"
ADVICE = {
    AT_THE_START: advice_at_the_start,
    IN_TRAINING: advice_in_training,
    IN_EVALUATION: advice_in_evaluation,
}


def room() -> int | None:
    """Bytes that this process may still take: its part of the machine's or container's, within its limit.

    None where the system doesn't tell.
    """
    try:
        told = Path("/proc/meminfo").read_text()
        mine = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    available = re.search(r"MemAvailable: +(\d+) kB", told)
    if available is None:
        return None
    shared = [1024 * int(available[1])]
    for root, *names in CGROUPS:
        shared += cgroup_rooms(root, mine, *names)
    free = min(shared) // processes_here()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return free
    return max(min(free, limit - status("VmSize") - FOR_THREADS), 0)


def cgroup_rooms(root: Path, mine: str, limit: str, use: str, cached: str) -> list[int]:
    """What the group of this process and those above it leave free, where they set a limit.

    `mine` is /proc/self/cgroup. A container may not see its own group's path; then its root is the group.
    """
    places = re.findall(r"^(?:0:|\d+:[\w,]*\bmemory\b[\w,]*):/?(.*)$", mine, re.MULTILINE)
    rooms = []
    for place in places or [""]:
        for folder in {root / place, *(root / place).parents}:
            if folder != root and root not in folder.parents:
                continue
            try:
                most, used = (folder / limit).read_text().strip(), int((folder / use).read_text())
                listed = (folder / "memory.stat").read_text()
            except OSError:
                continue
            files = re.search(rf"^{cached} (\d+)$", listed, re.MULTILINE)
            if most.isdigit():  # else "max"
                rooms.append(int(most) - used + (int(files[1]) if files else 0))
    return rooms


def status(name: str) -> int:
    """A number of /proc/self/status in bytes, as VmRSS."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, name
    return 1024 * int(found[1])


def forget_peak() -> None:
    """Let VmHWM, the most memory that this process held, begin anew."""
    path, code = RESET_PEAK
    path.write_text(code)
