"""The README's table, from the files in benchmarks/results.

    python benchmarks/table.py

Rewrites the text between the two marks in README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# In the order of the table; missing files are left out.
FILES = ("gpu-h200.json", "zoo-h200.json", "zoo-pocl.json", "zoo-pocl-xeon.json", "train-pocl.json")
BEGIN, END = "<!-- table: python benchmarks/table.py -->\n", "<!-- end of the table -->\n"


def lines(results: Path) -> Iterator[str]:
    """The table, with a part for each file."""
    for name in FILES:
        path = results / name
        if not path.exists():
            continue
        about: dict[str, Any] = json.loads(path.read_text())
        peer = f", PyTorch {about['torch'].split('+')[0]}" if "torch" in about else ""
        yield f"`{about['command']}` on {about['device']}{peer}, commit {about['commit'][:7]}:\n\n"
        yield "| what | measured | |\n|---|---|---|\n"
        for row in about["rows"]:
            yield f"| {row['what']} | {row['value']:.2f} {row['unit']} | {row['detail']} |\n"
        yield "\n"


def with_table(text: str, results: Path) -> str:
    """A page with the table between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "".join([before, BEGIN, "\n", *lines(results), END, after])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), ROOT / "benchmarks" / "results"))
