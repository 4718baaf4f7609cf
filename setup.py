"""The one part of the build that needs a decision: whether the compiled kernel can be built here.

Everything else stands in pyproject.toml. The kernel is optional three times over: its source may be
absent, Cython may be absent, and the C compiler may be absent or fail. In each case the plain twins
in `upper.kernel` do the work, and the installation succeeds. `UPPER_KERNEL=required` makes any of
the three an error, for those who are at work on it.
"""

import os
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

KERNEL = Path("src/upper/kernel/_compiled.pyx")
REQUIRED = os.environ.get("UPPER_KERNEL") == "required"
# `make sanitize`: each access to memory is checked, and each cell of a map is a piece of memory of its own.
SANITIZED = "UPPER_SANITIZE" in os.environ
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def extensions() -> list[Extension]:
    if not KERNEL.exists() and not REQUIRED:
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        if REQUIRED:
            raise
        return []
    digest = run_path(str(KERNEL.parent / "choice.py"))["digest"]
    kernel = Extension(
        "upper.kernel._compiled",
        [str(KERNEL)],
        include_dirs=[str(KERNEL.parent)],
        depends=[str(header) for header in KERNEL.parent.glob("*.h")],
        define_macros=[("UPPER_SOURCES", f'"{digest(KERNEL.parent)}"')],
        extra_compile_args=(
            ["-O1", "-g", "-pthread", "-DUPPER_EXACT_BLOCKS", *CHECKS] if SANITIZED else ["-O3", "-pthread"]
        ),
        extra_link_args=CHECKS if SANITIZED else [],
    )
    made: list[Extension] = cythonize([kernel], language_level=3, build_dir="build/cython")
    for extension in made:
        extension.optional = not REQUIRED  # cythonize returns new extensions without this attribute
    return made


setup(ext_modules=extensions())
