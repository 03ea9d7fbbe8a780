"""The wheel holds every module and data file, and works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from image_folder import write_image_folder

pytestmark = pytest.mark.slow

PARTS = ("ssl", "backbones", "recipes", "launch")
MADE = ("__pycache__", "*.so", "*.pyd")  # by Python and by setup.py


@dataclass
class Installed:
    """Source, a wheel of it, where that is installed, and a folder far from the checkout to work in."""

    source: Path
    wheel: Path
    site: Path
    elsewhere: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.site)}
        return subprocess.run(
            command,
            cwd=self.elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def python(self, program: str) -> str:
        done = self.run(sys.executable, "-c", program)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def succeed(command: list[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Installed:
    """Source archive from a copy of the checkout, wheel from the archive, installation from the wheel."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    for part in ("nestling", *PARTS):
        shutil.copytree(repository / part, source / part, ignore=shutil.ignore_patterns(*MADE))
    for file in ("setup.cfg", "setup.py", "MANIFEST.in", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repository / file, source)
    succeed([sys.executable, "-m", "build", "--no-isolation", "--outdir", root / "dist"], source)
    (wheel,) = (root / "dist").glob("*.whl")
    site = root / "site"
    flags = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", site]
    succeed([sys.executable, "-m", "pip", "install", *flags, wheel], root)
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    return Installed(source, wheel, site, elsewhere)


def in_the_wheel(repository: Path, suffixes: Iterable[str]) -> set[str]:
    """Files of the checkout as they are called in the wheel."""
    files = [file for part in PARTS for file in (repository / part).rglob("*") if file.suffix in suffixes]
    return {str(Path("nestling") / file.relative_to(repository)) for file in files}


def test_the_wheel_holds_exactly_the_modules_and_their_data(installed: Installed, repository: Path) -> None:
    files = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    names = {name for name in files if not name.endswith((".so", ".pyd"))}
    expected = in_the_wheel(repository, {".py", ".pyi", ".yaml"}) | {
        "nestling/__init__.py",
        "nestling/py.typed",
    }
    assert names == expected
    assert "nestling/ssl/__init__.py" not in names


def test_the_wheel_carries_licence_and_readme(installed: Installed, repository: Path) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        (licence,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
        assert wheel.read(licence) == (repository / "LICENSE").read_bytes()
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        assert (repository / "README.md").read_text("utf-8").strip() in wheel.read(metadata).decode()


def test_every_module_of_the_wheel_imports_from_the_wheel(installed: Installed, repository: Path) -> None:
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in in_the_wheel(repository, {".py"})
    )
    program = f"""
import importlib, ssl
for name in {modules}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(installed.site)!r}), module
assert hasattr(ssl, "SSLContext")
print("all imported")
"""
    assert "all imported" in installed.python(program)


KERNELS = ("ssl/views", "ssl/terms", "backbones")
MODULES_OF_KERNELS = "from nestling.ssl.views import render; from nestling.ssl.terms import compiled"
MODULES_OF_KERNELS += "; from nestling.backbones import gelu"
NOT_THE_CHECKOUT = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in f.__module__]"
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_the_wheel_holds_the_compiled_kernels_and_uses_them(installed: Installed) -> None:
    program = f"{MODULES_OF_KERNELS}; print(*(module.kernel.__file__ for module in (render, compiled, gelu)))"
    for folder, file in zip(KERNELS, installed.python(program).split(), strict=True):
        assert file.startswith(f"{installed.site / 'nestling' / folder / 'kernel.'}")


def test_without_a_compiler_all_else_is_built(installed: Installed, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "setup.py",
        "build",
        "--build-base",
        tmp_path,
        "--build-lib",
        tmp_path / "built",
    ]
    environment = {**os.environ, "CC": "no-compiler"}
    done = subprocess.run(command, cwd=installed.source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in KERNELS:
        folder = tmp_path / "built" / "nestling" / name
        assert (folder / "__init__.py").is_file()
        assert [file.name for file in folder.glob("kernel.*")] == ["kernel.pyi"]
    program = f"{NOT_THE_CHECKOUT}; {MODULES_OF_KERNELS}; print(render.kernel, compiled.kernel, gelu.kernel)"
    alone = {**os.environ, "PYTHONPATH": str(tmp_path / "built")}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=alone, cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.stdout == "None None None\n", shown.stderr


def test_the_wheel_finds_its_recipes_configs(installed: Installed, repository: Path) -> None:
    program = """
from importlib.resources import files
print(*sorted(path.name for path in (files("nestling.recipes") / "configs").iterdir()))
"""
    expected = sorted(path.name for path in (repository / "recipes" / "configs").iterdir())
    assert installed.python(program).split() == expected


def test_the_console_script_of_the_wheel_runs_its_recipe(installed: Installed) -> None:
    script = installed.site / "bin" / "nestling"
    path = installed.run(script, "dino_xcit", "--path")
    assert path.stdout.strip() == str(installed.site / "nestling" / "recipes" / "dino_xcit.py"), path.stderr
    shown = installed.run(script, "dino_xcit", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "views.global_size" in shown.stdout


def test_the_wheel_trains_by_a_config_of_its_own_with_a_spawned_loader(installed: Installed) -> None:
    images = write_image_folder(installed.elsewhere / "images", classes=2, per_class=4, size=20)
    settings = [
        *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}"),
        *("views.global_size=16", "views.local_size=8", "views.num_local=1", "head.num_prototypes=16"),
        *("head.hidden_dim=16", "head.bottleneck_dim=8", "train.epochs=1", "train.batch_size=4", "knn.k=1"),
        *("optim.warmup_epochs=0", "teacher.temperature_warmup_epochs=0", f"data.train={images}", "out=run"),
        *("data.num_workers=1", "data.start_method=spawn", "data.holdout=0", "knn.every=0"),
    ]
    script, name = installed.site / "bin" / "nestling", "dino_xcit_small_12_p16"
    done = installed.run(script, "dino_xcit", "--cpu", "--config", name, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (installed.elsewhere / "run" / "last").is_file()
    assert "end 1.000e-05" in done.stdout, "as the published recipe has it"
