"""The gain of following `ps.advise`: programs with a single flaw, flawed and mended, run in turn.

    python benchmarks/advise.py [--device opencl:0] [--only NAME] [--rounds 7] [--save FILE]

The expected gain is what the advice says about a profile of the flawed program, as a share of its time or of
its memory. The measured gain is the share that mending saves, without a profile: of the best times of
several rounds, or of the most memory that was taken.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import numpy as np

import penstock as ps
from flaws import FLAWS, Flaw, Loop
from measuring import Report, best_of

_MEMORY = ("peak bytes", "bytes taken")


def opened(device: ps.Device, flaw: Flaw, side: str) -> tuple[ps.Device, Loop]:
    """A side of a flaw, on a separate device."""
    settings = flaw.settings if side == "flawed" else None
    made = ps.Device(f"{device.name}-{side}", device.capabilities, device.another_driver, settings)
    return made, getattr(flaw, side)(made)


def measure(device: ps.Device, flaw: Flaw, rounds: int, report: Report) -> None:
    """A flaw: its advice, and the gain."""
    sides = {side: opened(device, flaw, side) for side in ("flawed", "mended")}
    result, counts, shares = [], {}, {}
    for side, (made, loop) in sides.items():
        made.sync()
        with ps.profile(device=made) as p:
            kept = loop()
        del kept
        (evidence,) = p.evidence()
        counts[side] = flaw.count(evidence)
        advice = ps.advise(p)
        result.append([piece.flaw for piece in advice])
        for item in advice if side == "flawed" else ():
            whole = evidence.working_seconds if flaw.name != "changing-shapes" else evidence.seconds
            shares[item.flaw] = (
                item.seconds / whole
                if item.seconds is not None
                else (item.nbytes or 0)
                / (evidence.taken_bytes if flaw.name == "idle-memory" else evidence.peak_bytes)
            )
    named = result == [[flaw.name], []]
    if flaw.counted in _MEMORY:
        measured = 1 - counts["mended"] / counts["flawed"]
        detail = "memory"
    else:

        def waited(side: str) -> Loop:
            made, loop = sides[side]

            def run() -> None:
                loop()
                made.sync()

            return run

        best = best_of({side: waited(side) for side in sides}, rounds)
        measured = 1 - best["mended"] / best["flawed"]
        detail = ", ".join(f"{side} {seconds * 1e3:.2f} ms" for side, seconds in best.items())
    counted = f"{flaw.counted} {counts['flawed']:.4g} -> {counts['mended']:.4g}; {detail}"
    expected = shares.get(flaw.name, 0.0)
    report.add(f"{flaw.name}: expected gain", 100 * expected, "%", "named", named, f"advised {result}")
    report.add(f"{flaw.name}: measured gain", 100 * measured, "%", "", None, counted)
    for made, _ in sides.values():
        made.close()
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--only", action="append", help="the name of a flaw; may be given several times")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    device, report = ps.use(asked.device), Report()
    for flaw in FLAWS:
        if not asked.only or flaw.name in asked.only:
            try:
                measure(device, flaw, asked.rounds, report)
            except ps.errors.KernelError as error:  # a raw kernel need not have every language
                print(f"{flaw.name}: {error}")
    if asked.save:
        report.save(asked.save, "advise", device, {"numpy": np.__version__})


if __name__ == "__main__":
    main()
