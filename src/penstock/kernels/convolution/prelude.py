"""Convolutions in CUDA: the text that their kernels need, of the `.cu` files beside this one.

`items.cu` has the types of items, and which items of a window reach a result. `tiles.cu` has products on
tensor cores: those of a warp by `mma.sync`, and on sm_90a those of four warps together by `wgmma`, for items
of 16 bits. The next tiles are copied to shared memory meanwhile, with zeros for what is outside of the image.
`direct.cu` is for groups of few channels.
"""

from __future__ import annotations

from pathlib import Path


def _product_of_four_warps(columns: int) -> str:
    """`wgmma` with this many columns and both operands in shared memory, as a function.

    `TURNED`: the rows of both lie across the lines of memory.
    """
    count = columns // 2
    sums = ", ".join(f"%{k}" for k in range(count))
    outputs = ", ".join(f'"+f"(sums[{k // 4}][{k % 4}])' for k in range(count))
    lines = [
        f"    if ({condition}) asm volatile(\n"
        f'        "{{ .reg .pred p; setp.eq.u32 p, 0, 0;"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "\n'
        f'        "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, %{count + 2}, %{count + 2}; }}"\n'
        f'        : {outputs} : "l"(left), "l"(right), "n"(TURNED));\n'
        for dtype, condition in (("f16", "T::HALF"), ("bf16", "!T::HALF"))
    ]
    head = "template <class T, int TURNED> DEVICE void multiply_together(\n"
    return f"{head}    float (&sums)[{columns // 8}][4], ulong left, ulong right) {{\n{''.join(lines)}}}\n"


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


CONVOLUTION_PRELUDE = "\n".join(
    [
        "namespace convolving {",
        _beside("items.cu"),
        "#ifdef __CUDA_ARCH_FEAT_SM90_ALL",
        _product_of_four_warps(64),
        "#else",
        "template <class T, int TURNED, int N>",
        "DEVICE void multiply_together(float (&sums)[N][4], ulong left, ulong right) {}",
        "#endif",
        _beside("tiles.cu"),
        _beside("direct.cu"),
        "}",
    ]
)
