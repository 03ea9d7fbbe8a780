"""The comparisons of a training step's end, of compiled blocks and of a whole step run and are checked."""

import json
import os
import subprocess
import sys

import pytest

ROWS = {
    "optimizer": [
        "clipping, one gradient in ten above",
        "moving average",
        "AdamW",
        "clipping, AdamW, moving average",
        "clipping, all gradients above",
    ],
    "compiling": ["XCiT-T12/16, blocks compiled, fp32"],
    "whole_step": ["whole step, XCiT-T12/16, fp32", "whole step with its views, XCiT-T12/16, fp32"],
}


@pytest.mark.slow
@pytest.mark.parametrize("part", ROWS)
def test_a_part_compares_what_it_names(repository, tmp_path, part):
    script = repository / f"benchmarks/{part}.py"
    command = [sys.executable, script, "--quick", "--threads", "1", "--device", "cpu", "--json", "rows.json"]
    # What compiling costs is no matter here, and blocks that are not compiled equal those that should not be.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert [row["part"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ROWS[part]
