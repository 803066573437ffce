"""Imports point down: every part of the package may use those below it, and nothing above."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "penstock"

# From the top down. Parts of one line do not know each other. `penstock` is what users import.
LAYERS = [
    "__main__",
    "cli",
    "serving",
    "checking bench onnx train",
    "penstock report",
    "functions",
    "names",
    "models",
    "advising data distributed",
    "profiling optim",
    "nn dispatch testing",
    "measuring",
    "tensor",
    "execution",
    "compiler",
    "kernels",
    "plan fusion",
    "graph tuning_cache registry",
    "runtime",
    "opened",
    "stream",
    "memory",
    "drivers",
    "cache collectives",
    "files config terminal",
    "callsite errors formatting interrupts living lru printable",
]
LEVELS = {part: level for level, parts in enumerate(reversed(LAYERS)) for part in parts.split()}

# A tensor has to name the module of its functions, which the array API standard demands of it.
# The namespace gives what reads ONNX models, and the trainer, which are written with the namespace.
# A run has its model in checkpoints, which the trainer reads.
# GPT was a module of nn before there were families, and keeps its name there.
ALLOWED = {
    ("tensor/core.py", "penstock"),
    ("__init__.py", "distributed"),
    ("__init__.py", "onnx"),
    ("__init__.py", "train"),
    ("nn/__init__.py", "models"),
    ("models/loading.py", "train"),
}


def part_of(module: str) -> str:
    """The part of the package that a module belongs to."""
    return [*module.split("."), ""][1] or "penstock"


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules of the package that are imported anywhere in a file, with the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "penstock")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            if node.module == "penstock":
                parts = [alias.name for alias in node.names if alias.name in LEVELS]
                yield from ((f"penstock.{part}", "") for part in parts)
                yield from (("penstock", alias.name) for alias in node.names if alias.name not in LEVELS)
            elif (node.module or "").startswith("penstock."):
                yield from ((node.module or "", alias.name) for alias in node.names)


FILES = sorted(SOURCES.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(SOURCES).as_posix() for path in FILES])
def test_imports_point_down(path: Path) -> None:
    where = path.relative_to(SOURCES)
    own = "penstock" if where.as_posix() == "__init__.py" else where.parts[0].removesuffix(".py")
    assert own in LEVELS, f"{own} has no layer yet: say in this file where it belongs"
    for module, name in imports(ast.parse(path.read_text())):
        other = part_of(module)
        if other == own or (where.as_posix(), other) in ALLOWED:
            continue
        assert LEVELS[other] < LEVELS[own], f"{where} imports {module}, which is not below it"
        private = name.startswith("_") and not name.endswith("__")
        assert not private, f"{where} imports the private name {name} of {module}"


def test_the_compiler_is_imported_when_something_is_compiled() -> None:
    """It takes as long to import as all the rest."""
    code = "import sys, penstock; print(*(name for name in sys.modules if name.startswith('penstock.')))"
    names = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    late = ("penstock.compiler", "penstock.fusion", "penstock.kernels.lower", "penstock.plan")
    assert [name for name in names if name.startswith(late)] == []
