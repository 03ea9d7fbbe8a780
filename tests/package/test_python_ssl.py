"""The folder ssl/ at the root never hides Python's own ssl, however a program is started."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPTS = Path(sysconfig.get_path("scripts"))

PROBE = """
import asyncio, ssl, sys, urllib.request
import nestling.ssl.config
from torch.utils.data import DataLoader, Dataset


class Asked(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        import ssl
        return hasattr(ssl, "SSLContext") and "nestling" not in (ssl.__file__ or "")


if __name__ == "__main__":
    assert Asked()[0], ssl
    assert sys.modules["ssl"] is not sys.modules["nestling.ssl"]
    assert list(DataLoader(Asked(), num_workers=1, multiprocessing_context="spawn")) == [True]
    print("python's own")
"""


def run(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """A copy of the checkout with one more recipe, the probe."""
    for part in ("nestling", "ssl", "backbones", "recipes", "launch"):
        shutil.copytree(repository / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "recipes" / "probe.py").write_text(PROBE)
    return tmp_path


def test_ssl_has_no_init(repository: Path) -> None:
    assert (repository / "ssl").is_dir()
    assert not (repository / "ssl" / "__init__.py").exists()


def test_this_pytest_has_pythons_ssl(repository: Path) -> None:
    import ssl

    import nestling.ssl.config

    assert ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED
    assert Path(nestling.ssl.config.__file__).is_relative_to(repository)


def test_python_c_at_the_root_has_pythons_ssl(repository: Path) -> None:
    program = "import ssl, urllib.request, asyncio, nestling.ssl.config; print(ssl.OPENSSL_VERSION)"
    assert "SSL" in run([sys.executable, "-c", program], repository)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["append", "importlib"])
def test_pytest_has_pythons_ssl_in_its_other_import_modes_too(mode: str, repository: Path) -> None:
    test = "tests/package/test_python_ssl.py::test_this_pytest_has_pythons_ssl"
    flags = ["-q", "-p", "no:cacheprovider", f"--import-mode={mode}"]
    assert "1 passed" in run([sys.executable, "-m", "pytest", *flags, test], repository)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "recipes.probe"],
        [SCRIPTS / "accelerate", "launch", "--cpu", "--num_processes", "1", "recipes/probe.py"],
    ],
    ids=["module", "accelerate"],
)
def test_recipes_and_their_spawned_workers_have_pythons_ssl(
    launcher: list[str | Path], checkout: Path
) -> None:
    """Under accelerate a recipe is a file; torchrun starts one alike."""
    assert run(launcher, checkout).count("python's own") == 1
