"""What a step of single tokens consists of on a device that is described by a file, without that device.

    penstock devices --rates card.toml                # on a machine that has it, or write the file by hand
    python benchmarks/decode_steps.py card.toml --model llama-1b --batch 1 32

Turns wait for each other; kernels of one kind in a turn are a single launch, others may run side by side.
"""

from __future__ import annotations

import argparse
from typing import Any

import penstock as ps
from generate import SHAPES
from penstock.compiler.launches import arranged, launch_parts
from penstock.compiler.schedule import Schedule
from penstock.execution.realize import executables
from penstock.kernels.concatenation import Call
from penstock.kernels.sizes import Sizes
from penstock.models import LanguageModel
from penstock.models.decoders import Decoder
from penstock.models.paging import PAGE
from penstock.models.sampling import Needs
from penstock.nn.module import evaluating
from penstock.nn.quantizing import BITS, replace_linear
from penstock.tensor.jit_program import _Traced
from penstock.tuning_cache import TuningCache


def step_of(model: LanguageModel, batch: int, positions: int) -> Schedule:
    """The schedule of a step of greedy tokens, with so many sequences of so many positions at most."""
    pages = positions // PAGE
    decoder = Decoder(model, batch, batch * pages)
    for cache, shape in zip(decoder._caches, model.cache_shapes, strict=True):
        size = (2, decoder.pages, shape.heads, PAGE, shape.head_size)
        cache._become(ps.zeros(size, dtype=model.head_weight.dtype)._node)
    given = [ps.zeros((batch,), dtype=ps.int32), ps.zeros((batch, pages), dtype=ps.int32)]
    given += [ps.zeros((5, batch)), ps.zeros((batch, 2), dtype=ps.uint32)]
    function: Any = ps.jit(decoder._take_token)
    traced = function._traced(tuple(given), {"needs": Needs()}, given)
    with ps.no_grad(), evaluating(), traced as (tracing, _, outputs):
        return executables(ps.default_device()).schedule(
            _Traced("step", tracing, outputs, function._last).structure
        )


def launches_of(schedule: Schedule) -> list[Call]:
    """The launches of a schedule, with reductions in parts as single ones."""
    can = ps.default_device().capabilities
    parts = arranged(launch_parts(schedule, can), schedule, can, None, Sizes(TuningCache("")))
    return [call for part in parts if isinstance(part, list) for call in part if isinstance(call, Call)]


def empty_quantized(model: LanguageModel, bits: int) -> None:
    """Replace the layers of a model like `ps.quantize`, which needs values."""

    def layer(weight: ps.Tensor) -> ps.nn.QuantizedLinear:
        outputs, inputs = weight.shape
        made = ps.nn.QuantizedLinear(inputs, outputs, False, bits)
        made.scales = made.scales.astype(weight.dtype)
        return made

    replace_linear(model, lambda linear: layer(linear.weight))
    model._quantize_rest(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("card")
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--show", action="store_true", help="print every step of the schedule")
    chosen = parser.parse_args()
    ps.use(chosen.card)
    model = ps.models.build(SHAPES[chosen.model]).to(chosen.dtype)
    if chosen.quantize:
        empty_quantized(model, BITS[chosen.quantize])
    name = f"{chosen.model} {chosen.quantize or chosen.dtype}"
    for batch in chosen.batch:
        schedule = step_of(model, batch, chosen.positions)
        if chosen.show:
            print(schedule)
        print(f"{name}, batch {batch}: {len(launches_of(schedule))} launches in {schedule.turns} turns")


if __name__ == "__main__":
    main()
