"""`python tests/fuzz state --device webgpu --minutes 60`: random programs against NumPy, for hours."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/fuzz", description="Random programs, compared with NumPy.")
    parser.add_argument(
        "kind", choices=("state", "values"), help="what users do to tensors, or what is computed"
    )
    parser.add_argument("--device", default="opencl", help="opencl, webgpu, cuda, host, opencl:1 ...")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the first program; the time, unless it is given")
    parser.add_argument("--programs", type=int, help="stop after so many")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    given = parser.parse_args()
    if given.kind == "values":
        os.environ["PENSTOCK_FORCE_KERNELS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from fuzz import running, state, values

    from penstock.registry import find

    device = find(given.device)
    fuzzer = (state.StateFuzzer if given.kind == "state" else values.ValueFuzzer)(device)
    seed = given.seed if given.seed is not None else int(time.time()) * 1000
    print(f"{given.kind} on {device.name} ({device.capabilities.description}), from seed {seed}", flush=True)
    count = running.fuzz(
        fuzzer,
        seed,
        programs=given.programs,
        seconds=given.minutes * 60,
        most_failures=given.failures,
        tell=running.flushed,
    )
    print(count)
    return 1 if count.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
