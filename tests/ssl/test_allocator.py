"""What glibc is told shows in the pages that the system has to clear, counted in processes of their own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators stay as they are")

ONCE = 64 // 2 - 1  # pages of a tensor, where they are of 2 MB; most systems have 512 times as many
FEW = 10  # that the interpreter may take meanwhile
COUNTING = """
import resource
import torch
from torch.utils.data import Dataset
from nestling.ssl import allocator
from nestling.ssl.data.workers import loader_of
from nestling.ssl.run import processes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def new_pages():
    torch.zeros(96 * 2**20, dtype=torch.uint8).fill_(1)
    before = faults()
    torch.zeros(64 * 2**20, dtype=torch.uint8).fill_(1)
    return faults() - before

class Images(Dataset):
    def __getitem__(self, keys):
        return new_pages()
"""


def new_pages(code: str) -> int:
    """Pages that a tensor of 64 MB needs after one of 96 MB was freed, of which others may take a little."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING + code], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("before", ["", "allocator.keep_freed(); allocator.as_usual()"])
def test_glibc_clears_large_tensors_anew(before):
    assert new_pages(f"{before}\nprint(new_pages())") >= ONCE


@pytest.mark.parametrize("set_by", ["allocator.keep_freed()", "processes.join()"])
def test_a_process_that_computes_on_a_cpu_finds_the_pages_again(set_by):
    assert new_pages(f"{set_by}\nprint(new_pages())") < FEW


def test_what_was_kept_can_be_given_back():
    code = "allocator.keep_freed(); new_pages(); allocator.give_back(); before = faults(); new_pages()"
    assert new_pages(f"{code}; print(faults() - before)") >= ONCE


def test_loader_processes_hand_memory_back_whatever_their_parent_does():
    forked = "loader_of(Images(), [[0]], 1, 'fork')"
    assert new_pages(f"allocator.keep_freed()\nprint(next(iter({forked})))") >= ONCE
