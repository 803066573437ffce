"""Attention in CUDA: the text that its kernels need, of the `.cu` files beside this one.

`passes.cu` has the passes forward and backward. A workgroup has 64 queries or keys of a head, and loops over
tiles of the other side; the next tiles are copied while the current one is used. Scores exist in registers
only. Exponentials are powers of two, so a score is multiplied by `scale * log2(e)`. A query sees the keys up
to its own index plus `keys - queries`, or all of them. `pages.cu` has the pass of prompts over pages.

`tiles.cu` has tiles in shared memory: rows of up to 128 items of half precision, in one or two panels of 64
columns. A row of a panel takes 128 bytes, and its eight chunks of 16 bytes are swizzled by the last three
bits of the row's index, so that eight rows of a chunk, and eight chunks of a row, are in different banks.
Hopper's products read this order by themselves. Tiles begin at multiples of 1024 bytes.

A warp has 16 rows of the left operand and of the result in registers, and the four warps of a workgroup 64.
The functions on tensor cores have the same names in `wgmma.cu`, for products of four warps together (on
sm_90a only), and in `mma.cu`, for products of each warp (from sm_80 on).
"""

from __future__ import annotations

from pathlib import Path


def _product_of_four_warps(columns: int) -> str:
    """`wgmma` with this many columns, as a function."""
    count = columns // 2
    sums = ", ".join(f"%{k}" for k in range(count))
    left = ", ".join(f"%{count + k}" for k in range(4))
    outputs = ", ".join(f'"+f"(sums[{k // 4}][{k % 4}])' for k in range(count))
    inputs = ", ".join(f'"r"(left[{k}])' for k in range(4))
    lines = []
    for dtype, condition in (("f16", "HALF"), ("bf16", "!HALF")):
        lines.append(
            f"    if ({condition}) asm volatile(\n"
            f'        "{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"\n'
            f'        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "\n'
            f'        "{{{sums}}}, {{{left}}}, %{count + 4}, p, 1, 1, %{count + 6}; }}"\n'
            f'        : {outputs} : {inputs}, "l"(right), "r"(add), "n"(TURNED));'
        )
    return (
        "template <bool HALF, int TURNED> DEVICE void wgmma(\n"
        f"    float (&sums)[{columns // 8}][4], const uint (&left)[4], ulong right, int add) {{\n"
        + "\n".join(lines)
        + "\n}\n"
    )


def _beside(name: str) -> str:
    return "\n" + Path(__file__).with_name(name).read_text("utf-8")


ATTENTION_PRELUDE = (
    "\n".join(
        [
            _beside("tiles.cu"),
            "#ifdef __CUDA_ARCH_FEAT_SM90_ALL",
            *(_product_of_four_warps(columns) for columns in (16, 32, 48, 64)),
            _beside("wgmma.cu"),
            "#else",
            _beside("mma.cu"),
            "#endif",
        ]
    )
    + _beside("passes.cu")
    + _beside("pages.cu")
)
