"""The accelerate configs: read by accelerate, complete, and silent when launched."""

import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

CONFIGS = sorted((Path(__file__).parents[2] / "launch" / "configs").glob("*.yaml"))


def test_there_is_a_config_for_each_kind_of_machine() -> None:
    assert [path.stem for path in CONFIGS] == ["cpu", "multi_gpu", "multi_node", "single"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_config(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.distributed_type == ("MULTI_GPU" if path.stem.startswith("multi") else "NO")
    assert config.use_cpu is (path.stem == "cpu")
    assert (config.num_processes > 1) is path.stem.startswith("multi")
    assert config.num_machines == (2 if path.stem == "multi_node" else 1)
    assert config.num_processes % config.num_machines == 0
    assert config.mixed_precision == "no"  # the recipe's train.precision decides


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "single"])
def test_a_launch_with_the_config_says_nothing_of_its_own(
    name: str, tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "print(accelerator.num_processes, accelerator.mixed_precision)\n"
    )
    config = repository / "launch" / "configs" / f"{name}.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 no\n", "")
