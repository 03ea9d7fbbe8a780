"""What all tests share: no network, one thread, no user's settings, an order, and images to learn from."""

import os

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order, and no fight over few cores
os.environ["HF_HUB_OFFLINE"] = "1"

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_folder import write_image_folder


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist (3.8 and later) hands files out in the order below, not by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end short ones are left, and no process works long alone."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What scans remember goes to a folder of this session, in processes that tests start too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """A factory: image_folder(name="images", classes=3, per_class=8, size=32, seed=0) returns a new folder.

    `classes` is a number or a list of folder names; see tests/image_folder.py.
    """

    def write(name: str = "images", **settings: object) -> Path:
        return write_image_folder(tmp_path / name, **settings)  # type: ignore[arg-type]

    return write


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def fresh_logger() -> None:
    """nestling's logger as Python makes it: runs of an earlier test in this process have set it up."""
    logger = logging.getLogger("nestling")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    """accelerate as a process finds it at its start: it remembers the run of an earlier test."""
    if "accelerate.state" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_allocator() -> None:
    """glibc as a process finds it: a run of an earlier test in this one made it keep what is freed."""
    if "nestling.ssl.allocator" in sys.modules:
        from nestling.ssl import allocator

        allocator.as_usual()


@pytest.fixture
def own_backbones() -> Iterator[None]:
    """`two_layers` and `witness` of small_runs.py, by name."""
    from small_runs import registered

    with registered():
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads, for the length of a test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """torch.compile refuses a function that an earlier test has let it compile too often."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
