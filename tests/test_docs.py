"""The snippets of the documentation run, in the order in which they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import WEBGPU_KINDS

import penstock as ps
from penstock import registry
from penstock.config import Settings

ROOT = Path(__file__).parent.parent


def snippets(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


PAGES: list[Any] = ["README.md", pytest.param("docs/advise.md", marks=pytest.mark.alone)]  # by times
PAGES += [f"docs/{name}.md" for name in ("bench", "kernels", "memory", "profiling", "runtime", "tensors")]
PAGES += [
    "docs/dispatch.md",
    "docs/distributed.md",
    "docs/models.md",
    "docs/nn.md",
    "docs/onnx.md",
    "docs/training.md",
    "docs/troubleshooting.md",
]
PAGES += ["docs/webgpu.md"] if WEBGPU_KINDS else []


@pytest.mark.slow("docs/training.md", "docs/bench.md", "docs/dispatch.md", "docs/memory.md")
@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_default", None)  # which a page may change
    monkeypatch.chdir(tmp_path)  # where it writes its files
    try:
        exec(compile(snippets(page), page, "exec"), {})
    finally:
        ps.default_device().limit_bytes = None


def test_the_table_of_figures_is_that_of_the_result_files() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    page = (ROOT / "README.md").read_text()
    assert table["with_table"](page, ROOT / "benchmarks" / "results") == page


def test_the_table_of_settings_has_every_one_of_them() -> None:
    named = re.findall(r"^\| `PENSTOCK_(\w+)`", (ROOT / "docs/runtime.md").read_text(), re.MULTILINE)
    assert sorted(name.lower() for name in named) == sorted(Settings.__dataclass_fields__)
