"""Scripts that a test starts in a fresh Python, where pytest's threads are not around."""

import subprocess
import sys
import textwrap
from pathlib import Path


def ran(script: str, images: Path, folder: Path, repository: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script that finds the helpers of tests/, with `images` and `folder` as its arguments."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(file), str(images), str(folder)],
        env={
            "PYTHONPATH": str(repository / "tests"),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
