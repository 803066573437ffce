"""Convolutions in CUDA: the text that their kernels need, of the `.cu` files beside this one.

`items.cu` has the types of items, and which items of a window reach a result. `tiles.cu` has products on
tensor cores: tiles of 16 rows are multiplied by `mma.sync`, and the next tiles are copied to shared memory
meanwhile, where 16 bytes that are outside of the image become zeros. `direct.cu` is for groups of few channels.
"""

from __future__ import annotations

from pathlib import Path

CONVOLUTION_PRELUDE = "\n".join(
    ["namespace convolving {"]
    + [Path(__file__).with_name(f"{name}.cu").read_text("utf-8") for name in ("items", "tiles", "direct")]
    + ["}"]
)
