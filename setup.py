"""The parts of the package that are compiled; all else about it is in setup.cfg.

They are optional: where there is no C compiler the package installs without, and NumPy and PyTorch render the
views and compute the loss, to the same within rounding but more slowly.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Contracted products would round differently from processor to processor, and at the end of a loop.
GNU = [
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fno-wrapv",  # Python asks for it, and GCC then leaves loops scalar: a resize took three times as long
]
FLAGS = {"msvc": ["/O2", "/fp:precise", "/std:c11", "/utf-8"]}  # C11 has `restrict`
FINITE = {"nestling.ssl.views.kernel"}  # all levels are; of logits it must be seen when they are not
SHARED = Path("backbones/native")  # what the kernels of ssl use of it too


class Build(build_ext):
    """With the flags of the compiler that is found."""

    def build_extension(self, ext: Extension) -> None:
        gnu = [*GNU, "-ffinite-math-only"] if ext.name in FINITE else GNU
        ext.extra_compile_args = FLAGS.get(self.compiler.compiler_type, gnu)
        super().build_extension(ext)


def kernel(folder: str, *shared: str) -> Extension:
    """The C files in `native` of a folder, and some that are shared."""
    sources = sorted(
        str(path) for path in (*Path(folder, "native").glob("*.c"), *map(SHARED.joinpath, shared))
    )
    headers = {str(path) for place in (Path(folder, "native"), SHARED) for path in place.glob("*.h")}
    name = f"nestling.{folder.replace('/', '.')}.kernel"
    return Extension(name, sources, depends=sorted(headers), optional=True)


KERNELS = [kernel("ssl/views"), kernel("ssl/terms", "share.c"), kernel("backbones")]

setup(ext_modules=KERNELS, cmdclass={"build_ext": Build})
