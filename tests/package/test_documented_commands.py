"""Every command that README and docs show does what it says: shrunk recipes, pip from a copy, make by CI."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import (
    BENCHMARKS,
    DETECTION,
    EVAL,
    EXPORT,
    FINETUNE,
    FIRST,
    HELP,
    MAKE,
    MEASURE,
    OTHER,
    PIP,
    PRETRAIN,
    ROOT,
    SHOWN,
    SIZES,
    SLURM,
    UNLABELLED,
    once,
)
from export_subjects import write_run
from image_folder import write_image_folder
from recipes_here import said_here

from nestling.launch import catalog, slurm
from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.export.exporting import TARGETS
from nestling.ssl.run import checkpoints

BIN = Path(sys.executable).parent
SHRUNK = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=1", "data.num_workers=0"),
    *("head.num_prototypes=16", "head.hidden_dim=16", "head.bottleneck_dim=8", "knn.k=3", "knn.size=16"),
    *("train.epochs=1", "train.batch_size=4", "optim.warmup_epochs=0", "teacher.temperature_warmup_epochs=0"),
]


EXPORTED = {  # what lies beside export.json
    "nestling": ["README.md", "model.safetensors"],
    "timm": ["config.json", "model.safetensors"],
    "hf": ["config.json", "model.safetensors", "preprocessor_config.json"],
    "onnx": ["model.onnx"],
    "torch_export": ["model.pt2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images, the finished run of the first documented command, and a YAML of one's own."""
    folder = tmp_path_factory.mktemp("documented")
    write_image_folder(folder / "images", classes=2, per_class=8, size=20)
    write_image_folder(folder / "others", classes=2, per_class=4, size=20, seed=1)
    (folder / "my.yaml").write_text(f"data: {{train: {folder / 'images'}}}\n")
    pretrain(FIRST, folder, folder / "run")
    return folder


def call(command: list[str], where: Path = ROOT) -> str:
    done = subprocess.run(
        command,
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
    return done.stdout


def run_here(command: list[str]) -> str:
    """A recipe's command in this process; .ci/smoke starts every recipe as a user does."""
    (script,) = (word for word in command if word.startswith("recipes/"))
    return said_here(Path(script).stem, command[command.index(script) + 1 :])


def placed(command: str, folder: Path) -> list[str]:
    """The command with its paths replaced by the fixture's."""
    checkpoint = checkpoints.newest(folder / "run")
    command = re.sub(r"runs/\w+/checkpoints/\w+", str(checkpoint), command)
    command = re.sub(r"runs/\w+", str(folder / "run"), command)
    command = re.sub(r"(data\.train=)\S+", rf"\1{folder / 'images'}", command)
    command = re.sub(r"(data\.val=)\S+", rf"\1{folder / 'others'}", command)
    command = re.sub(r"(init_from=)\S+", rf"\1{folder / 'run'}", command)
    command = command.replace("my.yaml", str(folder / "my.yaml"))
    program, *arguments = shlex.split(command)
    return [str(BIN / program), *arguments]


def shrunk(command: list[str], folder: Path) -> list[str]:
    """Made small by overrides: a key that is given and overridden is given once."""
    names = {argument.partition("=")[0] for argument in command}
    overridden = {argument.partition("=")[0] for argument in SHRUNK}
    images = [f"data.train={folder / 'images'}"] if "data.train" not in names else []
    kept = [argument for argument in command if argument.partition("=")[0] not in overridden]
    return [*kept, *images, *SHRUNK]


def pretrain(command: str, folder: Path, out: Path) -> Path:
    """Run a documented pretraining, shrunk; returns its folder. Each kind of launcher starts one."""
    start = run_here if command.startswith("accelerate") and command != FIRST else call
    start([*shrunk(placed(command, folder), folder), f"out={out}"])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("command", once(PRETRAIN))
def test_a_documented_pretraining_leaves_a_run_with_a_checkpoint(command, folder, tmp_path):
    run = folder / "run" if command == FIRST else pretrain(command, folder, tmp_path / "run")
    newest = checkpoints.newest(run)
    assert newest is not None
    checkpoint = checkpoints.load(newest)
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert checkpoint.trainer["step"] == last["step"] > 0
    assert last["epoch"] == 1
    two = re.search(r"(--processes|--nproc_per_node) 2", command)
    assert checkpoint.trainer["num_processes"] == (2 if two else 1)


@pytest.mark.slow
@pytest.mark.parametrize("command", once(EVAL))
def test_a_documented_evaluation_prints_its_table_and_writes_its_numbers(command, folder):
    for file in folder.glob("run/results/*"):
        file.unlink()
    printed = run_here(placed(command, folder))
    (file,) = folder.glob("run/results/knn_*.json")
    found = json.loads(file.read_text())
    assert found["network"] == ("student" if "network=student" in command else "teacher")
    assert found["data"]["val"] == str(folder / ("others" if "data.val=" in command else "images"))
    accuracy = found["results"]["knn/cls/top1_k3"]
    assert 0 <= accuracy <= 1
    assert re.search(rf"cls\W+3\W+{100 * accuracy:.1f}\b", printed), printed
    assert f"written to {file}" in printed.replace("\n", "")


@pytest.fixture(scope="module")
def another(folder) -> Path:
    """A second run to compare with."""
    return Path(shutil.copytree(folder / "run", folder / "another"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [*SIZES, *UNLABELLED])
def test_a_documented_comparison_writes_what_it_prints(command, folder, another):
    for file in folder.glob("run/results/*"):
        file.unlink()
    quick = ["timing.batch_size=2", "timing.repeats=1"] if command in SIZES else []
    printed = run_here([*placed(command.replace("runs/another", str(another)), folder), *quick])
    (file,) = folder.glob("run/results/*.json")
    found = json.loads(file.read_text())["results"]
    if command in UNLABELLED:
        assert f"{found['features/rankme/cls']:.4g}" in printed
        assert any("overlap" in name for name in found) == ("other=" in command)
    else:
        assert list(found) == ["run", *(["another"] if "others=" in command else [])]
        assert ("224x320" in found["run"]) == ("224x320" in command)
        assert all(f"{row['images_per_second']:.4g}" in printed for row in found["run"].values())
        assert file.with_suffix(".csv").is_file()
        assert file.with_suffix(".png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", once(EXPORT))
def test_a_documented_export_writes_a_folder_that_was_compared(command, tmp_path):
    """Of a ViT, which every target takes; Python says the recipe's own lines alone, no warnings."""
    run = write_run(tmp_path / "run", "vit")
    printed = run_here(placed(command, tmp_path))
    (file,) = run.glob("checkpoints/*/export_*/export.json")
    found, out = json.loads(file.read_text()), file.parent
    target, network = found["target"], "student" if "network=student" in command else "teacher"
    assert f"--to {target}" in command
    assert out == run / "checkpoints/step_00000007" / f"export_{target}"
    assert sorted(path.name for path in out.iterdir()) == sorted(["export.json", *EXPORTED[target]])
    assert (found["network"], found["step"], found["checked"]) == (network, 7, "loaded back")
    differences = [
        f"largest difference at {size.replace('x', ' x ')} pixels: {difference:.2g}"
        for size, difference in found["sizes"].items()
    ]
    first = f"{network} of {out.parent}, vit_tiny_p16, to {target}"
    assert printed.splitlines() == [first, *differences, f"written to {out}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", MEASURE)
def test_a_documented_measurement_prints_what_to_normalise_by(command, folder):
    printed = run_here(placed(command, folder))
    assert "16 images in" in printed
    assert re.search(r"data\.mean='\[[\d., ]+\]' data\.std='\[[\d., ]+\]'", printed)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_documented_benchmark_has_a_test_that_runs_it(command):
    script = Path(shlex.split(command)[1])
    assert (ROOT / script).is_file()
    assert f"benchmarks/{script.name}" in (ROOT / f"tests/benchmarks/test_{script.name}").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", HELP)
def test_a_documented_help_explains_the_keys(command, folder):
    printed = call(placed(command, folder))
    for key in ("data.train", "views.global_size", "teacher.momentum", "optim.lr", "knn.k"):
        assert re.search(rf"^\s*{re.escape(key)}\b", printed, re.MULTILINE), key


@pytest.mark.slow
def test_the_console_script_alone_lists_the_recipes():
    printed = call([str(BIN / "nestling")])
    for name, path in catalog.recipe_paths().items():
        assert re.search(rf"^\s*{name}\s+{re.escape(catalog.summary(path))}$", printed, re.MULTILINE), name


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """What pip builds from, away from the checkout, so that no litter is left in it."""
    copy = tmp_path_factory.mktemp("copy")
    for part in ("nestling", "ssl", "backbones", "recipes", "launch"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("setup.cfg", "setup.py", "MANIFEST.in", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.mark.slow
def test_the_documented_installations_install(copy, tmp_path):
    """With all extras at once; without dependencies and with the setuptools here, which need the network."""
    forms = [re.fullmatch(r"pip install (?:'\.\[(\w+)\]'|\.)", command) for command in PIP]
    extras = [form[1] for form in forms if form and form[1]]
    assert all(forms)
    assert extras
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    what = ["--target", str(tmp_path / "site"), f".[{','.join(extras)}]"]
    said = call([sys.executable, "-m", "pip", "install", *offline, *what], copy)
    assert "does not provide the extra" not in said
    assert "Successfully installed nestling" in said
    here = [sys.executable, "-c", "import nestling.ssl.config as found; print(found.__file__)"]
    ssl = tmp_path / "site" / "nestling" / "ssl"
    assert Path(call(here, tmp_path / "site").strip()) == ssl / "config.py"
    kernels = 3 if shutil.which("cc") else 0
    assert len(list(ssl.parent.rglob("kernel.*.so"))) == kernels


@pytest.mark.parametrize("command", SLURM)
def test_the_launcher_for_slurm_and_its_recipe_take_what_is_documented(command):
    program, *arguments = shlex.split(command)
    assert [program, *arguments[:2]] == ["python", "-m", "nestling.launch.slurm"]
    options = slurm.parser().parse_args(arguments[2:])
    assert catalog.find(options.recipe) == ROOT / "recipes" / "dino_xcit.py"
    demo = ROOT / "recipes" / "configs" / "photo_tiles.yaml"
    config = read(Config, options.arguments, program="recipe", default=demo)
    for argument in options.arguments:
        name, _, value = argument.partition("=")
        assert str(getattr(config, name)) == value


@pytest.mark.parametrize("command", MAKE)
def test_a_documented_target_of_make_is_run_by_ci(command):
    assert re.search(
        rf"^{command}\b", (ROOT / ".ci" / "run").read_text() + (ROOT / ".ci" / "smoke").read_text(), re.M
    )


def test_commands_of_every_kind_were_found():
    assert {"make demo", "make test"} <= set(MAKE)
    assert {"pip install .", "pip install '.[demo]'"} <= set(PIP)
    assert set(OTHER) <= set(SHOWN)
    assert min(map(len, (SLURM, HELP, EVAL, SIZES, UNLABELLED, FINETUNE, DETECTION))) >= 1
    assert {command.split("--to ")[1].split()[0] for command in EXPORT} == set(TARGETS)
    assert len(PRETRAIN) >= 7
