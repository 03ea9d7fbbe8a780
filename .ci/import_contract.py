"""Checks the import contract of setup.cfg with import-linter.

In a checkout the parts of nestling lie beside the package and ssl/ has no __init__.py, so
import-linter alone would see one module and pass. This lays links as a wheel would lie,
ssl/__init__.py added, and fails unless every module was seen.

    python .ci/import_contract.py [ROOT]
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grimp

PARTS = ("ssl", "backbones", "recipes", "launch")


def lay_out(root: Path, target: Path) -> set[str]:
    """Link the modules of a checkout as one package; returns their names."""
    package = target / "nestling"
    package.mkdir()
    (package / "__init__.py").symlink_to(root / "nestling" / "__init__.py")
    modules = {"nestling"}
    for part in PARTS:
        for file in (root / part).rglob("*.py"):
            link = package / file.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
            parts = link.relative_to(target).with_suffix("").parts
            modules.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    (package / "ssl" / "__init__.py").touch(exist_ok=False)
    shutil.copy(root / "setup.cfg", target)
    return modules | {"nestling.ssl"}


def main(root: Path) -> int:
    """Exit code: 0 where every module was seen and every contract holds."""
    with tempfile.TemporaryDirectory() as folder:
        modules = lay_out(root, Path(folder))
        sys.path.insert(0, folder)
        unseen = modules - grimp.build_graph("nestling", cache_dir=None).modules
        if unseen:
            print(
                f"not seen by import-linter, as a folder lacks its __init__.py: {', '.join(sorted(unseen))}"
            )
            return 1
        print(f"import-linter reads {len(modules)} modules", flush=True)
        entry = "from importlinter.cli import lint_imports_command as main; main()"
        return subprocess.call([sys.executable, "-c", entry, "--no-cache"], cwd=folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()))
