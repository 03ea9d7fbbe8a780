"""The console script: what it lists, what it refuses, and how it runs a recipe."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestling.launch import catalog, cli

# One write a line: `print` may give a pipe its line and the line's end apart, and two processes share it.
RECIPE = '''"""Says what it was given.

More.
"""
import os, signal, sys, time

if __name__ == "__main__":
    if "wait" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.write(1, b"ready\\n")
        time.sleep(120)
    rank = os.environ.get("RANK", "-")
    said = [f"rank={rank} of {os.environ.get('WORLD_SIZE', '-')}", *sys.argv[1:]]
    os.write(1, (" ".join(said) + "\\n").encode())
    sys.exit(int(os.environ.get("CODE", "0")) if rank in "-1" else 0)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "say.py"
    path.write_text(RECIPE)
    return str(path)


def nestling(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nestling.launch.cli", *arguments]
    user = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        command, env={**user, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_recipe_it_lists_them_with_their_first_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "usage:" in lines
    for name, path in catalog.recipe_paths().items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        first = path.read_text("utf-8").removeprefix('"""').split("\n")[0].removesuffix('"""')
        assert line.endswith(first)


def test_listing_and_helping_import_neither_torch_nor_a_recipe() -> None:
    program = (
        "import sys; from nestling.launch import cli; cli.main(['--help']); "
        "print([m for m in sys.modules if m == 'torch' or m.startswith('nestling.recipes.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_recipes_are_the_scripts_and_not_their_helpers() -> None:
    paths = catalog.recipe_paths()
    assert "dino_xcit" in paths
    assert "__init__" not in paths


def test_summary_is_the_first_line_of_the_docstring(recipe: str, tmp_path: Path) -> None:
    assert catalog.summary(Path(recipe)) == "Says what it was given."
    (tmp_path / "bare.py").write_text("x = 1\n")
    assert catalog.summary(tmp_path / "bare.py") == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["dino_xcti"], "did you mean dino_xcit?"),
        (["zzz"], "there are"),
        (["missing/recipe.py"], "missing/recipe.py"),
        (["dino_xcit", "--processes", "0"], "--processes 0"),
        (["dino_xcit", "--processes", "two"], "two"),
        (["dino_xcit", "--processes"], "--processes"),
        (["--cpu"], "names no recipe"),
        (["--procesess", "2", "dino_xcit"], "--procesess names no recipe"),
    ],
)
def test_mistakes_end_with_code_2_and_one_sentence(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert named in output.err
    assert output.err.count("\n") == 1


def test_a_recipes_path_is_printed(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    assert cli.main(["dino_xcit", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(repository / "recipes" / "dino_xcit.py")


def test_our_options_are_taken_out_and_the_rest_keeps_its_order() -> None:
    options, rest = cli.parse(["r", "a=1", "--processes", "4", "--config", "x", "b=2", "--cpu", "--help"])
    assert (options.processes, options.cpu) == (4, True)
    assert rest == ["r", "a=1", "--config", "x", "b=2", "--help"]


def test_all_gpus_are_used_unless_told_otherwise() -> None:
    assert cli.num_processes(None, num_gpus=8) == 8
    assert cli.num_processes(None, num_gpus=0) == 1
    assert cli.num_processes(2, num_gpus=8) == 2
    assert cli.num_processes(3, num_gpus=0) == 3
    with pytest.raises(ValueError, match=r"--processes 9: only 8 GPUs"):
        cli.num_processes(9, num_gpus=8)


@pytest.mark.slow
def test_one_process_gets_its_arguments_and_gives_its_exit_code(recipe: str) -> None:
    done = nestling(recipe, "--cpu", "a=1", "--config", "b", CODE="5")
    assert done.stdout == "rank=- of - a=1 --config b\n"
    assert done.returncode == 5


@pytest.mark.slow
def test_several_processes_run_and_the_failing_ones_exit_code_is_given(recipe: str) -> None:
    done = nestling(recipe, "--cpu", "--processes", "2", "a=1", CODE="5")
    assert sorted(done.stdout.splitlines()) == ["rank=0 of 2 a=1", "rank=1 of 2 a=1"]
    assert done.returncode == 5
    assert "OMP_NUM_THREADS" not in done.stderr
    assert nestling(recipe, "--cpu", "--processes", "2").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "code"), [("1", 7), ("2", 128 + signal.SIGTERM)])
def test_a_signal_reaches_the_recipe(recipe: str, processes: str, code: int) -> None:
    command = [sys.executable, "-m", "nestling.launch.cli", recipe, "--cpu", "--processes", processes, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(int(processes)):
            assert process.stdout.readline() == "ready\n"
        start = time.monotonic()
        process.terminate()
        assert process.wait(60) == code
        assert time.monotonic() - start < 20  # the recipe ended by itself, not by a later SIGKILL
        assert process.stdout.read() == ""
