"""A GPT-2 in Hugging Face's layout, against what PyTorch computed with it: logits to training.

The files are not part of the project: PENSTOCK_CASES names the folder that holds `gpt2_tiny`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import penstock as ps
from penstock import nn, optim
from penstock.nn import pretrained

CASES = os.environ.get("PENSTOCK_CASES")
pytestmark = pytest.mark.skipif(not CASES, reason="PENSTOCK_CASES does not name the folder of the cases")
FOLDER = Path(CASES or ".") / "gpt2_tiny"
