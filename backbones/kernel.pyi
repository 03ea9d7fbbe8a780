"""Compiled from the C files in native/, where a compiler was there when the package was installed.

Arrays are told by their address, and nothing checks that they are as long as `number` says.
"""

def use_threads(address: int) -> None:
    """That of GOMP_parallel; without it `threads` below only divides the work, in one thread."""

def gelu(out: int, x: int, slopes: int, number: int, is_half: bool, threads: int) -> None:
    """Values and slopes of fp32, or of bf16, of which slopes are int16 steps of 2^-14."""

def gelu_backward(out: int, gradient: int, slopes: int, number: int, threads: int) -> None:
    """out = gradient * slopes, of bf16."""
