"""Where cases from outside the project are: PENSTOCK_CASES, or `shared/cases` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[2] / "shared" / "cases"
_GIVEN = os.environ.get("PENSTOCK_CASES")
FOLDER = Path(_GIVEN) if _GIVEN else _BESIDE
PRESENT = bool(_GIVEN) or _BESIDE.is_dir()
needs_cases = pytest.mark.skipif(
    not PRESENT, reason="there is no ../shared/cases, and PENSTOCK_CASES names no folder of the cases"
)
