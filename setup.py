"""The one part of the package that is compiled; all else about it is in setup.cfg.

It is optional: where there is no C compiler the package installs without, and views are rendered by NumPy and
PyTorch, to the same within rounding but more slowly.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Contracted products would round differently from processor to processor. All levels are finite.
GNU = [
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
]
FLAGS = {"msvc": ["/O2", "/fp:precise", "/std:c11", "/utf-8"]}  # C11 has `restrict`


class Build(build_ext):
    """With the flags of the compiler that is found."""

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args = FLAGS.get(self.compiler.compiler_type, GNU)
        super().build_extension(ext)


sources = sorted(str(path) for path in Path("ssl/views/native").glob("*.c"))
kernel = Extension("nestling.ssl.views.kernel", sources, depends=["ssl/views/native/native.h"], optional=True)
setup(ext_modules=[kernel], cmdclass={"build_ext": Build})
