import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_time_of_both_families_are_told_and_attention_was_fused(repository):
    command = [sys.executable, repository / "benchmarks/resolution_memory.py", "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]
    kinds = ("forward, memory", "forward + backward, memory", "forward, time", "forward + backward, time")
    assert [row[:4] for row in rows] == [["16", "144", "81", kind] for kind in kinds]
    numbers = [[float(cell.split()[0]) for cell in row[4:]] for row in rows]
    assert all(number > 0 for row in numbers for number in row)
    assert numbers[0][0] < numbers[1][0]  # a step keeps what a forward alone lets go
    assert numbers[0][1] < numbers[1][1]
