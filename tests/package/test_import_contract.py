"""The import contract sees every module and is not satisfied by a violation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    for part in ("nestling", "ssl", "backbones", "recipes", "launch"):
        shutil.copytree(repository / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "setup.cfg", tmp_path)
    return tmp_path


def check(repository: Path, root: Path) -> tuple[int, str]:
    command = [sys.executable, repository / ".ci" / "import_contract.py", root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_contract_is_kept(repository: Path) -> None:
    code, output = check(repository, repository)
    assert code == 0, output
    assert "4 kept, 0 broken" in output


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("backbones/violation.py", "import nestling.ssl.errors", "ssl uses backbones"),
        ("backbones/violation.py", "from nestling.ssl import errors", "ssl uses backbones"),
        ("backbones/violation.py", "import numpy", "import torch only"),
        ("backbones/weights/violation.py", "import safetensors", "import torch only"),
        ("ssl/violation.py", "from nestling.recipes import __doc__", "recipes use ssl"),
        ("ssl/data/violation.py", "import nestling.recipes", "recipes use ssl"),
        ("ssl/violation.py", "def late():\n    import nestling.launch.cli", "how it is launched"),
        ("launch/violation.py", "from nestling.ssl.errors import UserError", "by path only"),
        ("recipes/violation.py", "from nestling.launch import catalog", "how it is launched"),
    ],
)
def test_a_violation_is_found(file: str, line: str, contract: str, repository: Path, checkout: Path) -> None:
    (checkout / file).write_text(line + "\n")
    code, output = check(repository, checkout)
    assert code != 0
    broken = [heading for heading in output.splitlines() if "BROKEN" in heading]
    assert len(broken) == 1, output
    assert contract in broken[0]


def test_a_folder_without_init_is_not_passed_over(repository: Path, checkout: Path) -> None:
    (checkout / "backbones" / "more").mkdir()
    (checkout / "backbones" / "more" / "hidden.py").write_text("import nestling.ssl.errors\n")
    code, output = check(repository, checkout)
    assert code == 1
    assert "nestling.backbones.more.hidden" in output
