"""What all rules share: thresholds of gains, and how gains are described."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.advising.advice import Advice
from penstock.callsite import in_package
from penstock.formatting import format_seconds
from penstock.profiling.evidence import Evidence
from penstock.profiling.lines import Runs

LEAST_TIME = 0.05  # of the time: two runs of the same program may differ by that much
LEAST_MEMORY = 0.10  # of the memory: the pool rounds sizes by nearly as much
OFTEN = 10  # what happens less often belongs to the start or the end, not to a loop
# Parts of the package that decide when to read, send and compute, for which no line of the user's code is
# responsible.
_INNER = ("nn/", "models/", "optim/", "data/", "bench/", "checking.py", "testing.py")


@dataclass(frozen=True)
class Finding:
    """A piece of advice, and all lines that the flaw explains, which other rules ignore."""

    advice: Advice
    lines: frozenset[str]


Rule = Callable[[Evidence], Iterator[Finding]]


def finding(
    flaw: str,
    title: str,
    evidence: str,
    where: str,
    change: str,
    gain: str,
    seconds: float | None = None,
    nbytes: int | None = None,
    also: tuple[str, ...] = (),
) -> Finding:
    """A finding about a line; `also` lists other lines that it explains."""
    line = "" if where.startswith("(") else where  # a thread, or many lines
    advice = Advice(flaw, title, evidence, line, change, gain, seconds, nbytes)
    return Finding(advice, frozenset(filter(None, (where, *also))))


def users_own(where: str, called: str) -> bool:
    """Whether a line of the user's code caused something, and not a part of this package."""
    return not in_package(where) and not called.startswith(_INNER)


def of_time(seconds: float, whole: float) -> str:
    """A description of a saving."""
    return f"about {format_seconds(seconds)} of {format_seconds(whole)}"


def least_seconds(run: Runs, evidence: Evidence) -> float | None:
    """How long all runs of a line take at the device's best rates; None if these are unknown."""
    rate, bandwidth = evidence.rate("float32"), evidence.rate("bytes")
    if not rate or not bandwidth:
        return None
    slow = sum(
        operations / (evidence.rate(dtype) or rate) - operations / rate
        for dtype, operations in run.products.items()
    )
    return max(run.operations / rate + slow, run.nbytes / bandwidth)
