"""PoCL with short headers, so that it compiles small kernels in a third of the time.

PoCL reads the declarations of all functions of OpenCL C before each program: 18,000 lines, which take it ten
times as long as most kernels of the tests. Here it reads those of the names that are in the program's text.
All overloads of such a name are there, so a kernel means the same. A program that does not build, as it may
put a name together from parts, is built with the whole header. The processes that tests start have PoCL as
it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_HEADER = "pocl_binary_distribution/.libs/share/pocl/include/opencl-c.h"
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
# A declaration begins at the start of a line and may go on over others.
_DECLARATION = re.compile(r"(^\w[^;#{}()]*\b(\w+)\([^;#{}]*;\n)", re.MULTILINE)
_CHOICE = """
#define PENSTOCK_QUOTED(name) #name
#define PENSTOCK_FILE(name) PENSTOCK_QUOTED(name)
#ifdef PENSTOCK_HEADER
#include PENSTOCK_FILE(PENSTOCK_HEADER)
#else
#include "opencl-c-whole.h"
#endif
"""


def shorten(folder: Path) -> None:
    """Have PyOpenCL load its PoCL from a copy in links with such headers. Before any platform is listed."""
    spec = importlib.util.find_spec("pyopencl")
    if spec is None or spec.origin is None or sys.platform != "linux":
        return
    site = Path(spec.origin).parent.parent
    libraries = sorted((site / "pyopencl/.libs").glob("libpocl*.so"))
    if not libraries or not (site / _HEADER).is_file():  # another PoCL than that of the wheels
        return
    whole = (site / _HEADER).read_text()
    copy = folder / f"pocl-{hashlib.sha256(f'{site}{whole}{_CHOICE}'.encode()).hexdigest()[:16]}"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        _link(site, made)
        (made / _HEADER).write_text(_CHOICE)
        (made / _HEADER).with_name("opencl-c-whole.h").write_text(whole)
        (made / "pyopencl/.libs/pocl.icd").write_text(str(copy / libraries[0].relative_to(site)))
        try:
            made.rename(copy)
        except OSError:  # another process was quicker
            shutil.rmtree(made)
    import pyopencl  # it sets the variable, which its loader reads later

    os.environ["PYOPENCL_HOME"] = str(copy / "pyopencl")
    _build_with_names(pyopencl, whole, (copy / _HEADER).parent)


def _build_with_names(pyopencl: Any, whole: str, folder: Path) -> None:
    """Have PyOpenCL build each program with the declarations of the names in its text."""
    rest_and_declarations = _DECLARATION.split(_COMMENT.sub("", whole))  # and the names that they declare
    declared = set(rest_and_declarations[2::3])
    build = pyopencl.Program.build

    def header(names: set[str]) -> str:
        """The name of the file with the declarations of these."""
        name = f"named_{hashlib.sha256(' '.join(sorted(names)).encode()).hexdigest()[:16]}.h"
        if not (folder / name).exists():
            parts = iter(rest_and_declarations)
            text = [next(parts)]
            for declaration, declares, rest in zip(parts, parts, parts, strict=True):
                text += (declaration, rest) if declares in names else (rest,)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                file.write("".join(text))
            os.replace(file.name, folder / name)  # at once, for the other workers
        return name

    def build_with_names(program: Any, options: list[str], **others: Any) -> Any:
        source = vars(program).get("_source")  # None for a binary
        if source is not None:
            names = declared.intersection(re.findall(r"\w+", source))
            try:
                return build(program, [*options, f"-DPENSTOCK_HEADER={header(names)}"], **others)
            except pyopencl.RuntimeError:
                pass  # what counts is whether the whole header helps, and what is said then
        return build(program, options, **others)

    pyopencl.Program.build = build_with_names


def _link(site: Path, copy: Path) -> None:
    for part in ("pyopencl/.libs", "pocl_binary_distribution/.libs"):
        for path in (site / part).rglob("*"):
            if path.is_file() and path.name not in ("opencl-c.h", "pocl.icd"):
                link = copy / path.relative_to(site)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
