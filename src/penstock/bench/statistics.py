"""Medians with confidence intervals, of times and of ratios of times.

Times on a machine that others use have a long tail: now and then a sample takes twice as long. A mean and its
standard error follow the tail; the median does not. The interval is that of order statistics: whatever the
distribution, each sample lies below the true median with probability one half, so the count of those that do
is binomial, and two of the sorted samples enclose the median with a known probability. Nothing is
drawn at random, so the same samples always give the same answer, and few samples give a wide interval where
a bootstrap of them would give an interval that is too narrow.

What this cannot see are phases in which everything is slower. Samples of a case are therefore taken in rounds
over all cases, spread over the whole run; those of two libraries are taken in turn, and their ratio is formed
round by round, so that a phase slows both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

CONFIDENCE = 0.95
MARGIN = 0.05  # a change of the ratio that is too small to matter, even if it is certain

Verdict = Literal["slower", "faster", "same"]


class Interval(NamedTuple):
    """A median, and the confidence interval of the true median."""

    low: float
    middle: float
    high: float


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two in the middle."""
    if not samples:
        raise ValueError("a median needs a sample")
    ordered = sorted(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of positive samples, which lies in the interval with at least this confidence.

    Fewer than 6 samples say nothing with 95%: then the interval goes from 0 to infinity.
    """
    ordered = sorted(samples)
    left_out = _left_out(len(ordered), confidence)
    if left_out is None:
        return Interval(0.0, median(ordered), math.inf)
    return Interval(ordered[left_out], median(ordered), ordered[-1 - left_out])


def ratio_in_turn(samples: Sequence[float], others: Sequence[float]) -> Interval:
    """The ratio of samples to others of the same rounds."""
    return median_interval([sample / other for sample, other in zip(samples, others, strict=True)])


def ratio_of_runs(samples: Sequence[float], others: Sequence[float]) -> Interval:
    """The ratio of samples to others of another run.

    Each side's interval misses its median with half the probability; both hold with the given confidence.
    """
    each = 1 - (1 - CONFIDENCE) / 2
    now, before = median_interval(samples, each), median_interval(others, each)
    low, high = now.low / before.high, now.high / before.low if before.low else math.inf
    return Interval(low, now.middle / before.middle, high)


def verdict(ratio: Interval) -> Verdict:
    """The verdict of a ratio of times: slower or faster only if the whole interval is beyond the margin."""
    if ratio.low > 1 + MARGIN:
        return "slower"
    return "faster" if ratio.high < 1 / (1 + MARGIN) else "same"


def _left_out(count: int, confidence: float) -> int | None:
    """How many sorted samples the interval may leave out at each end; None if there are too few samples."""
    # The interval misses when at most that many samples lie on one side of the median.
    missed, result = 0, None
    for below in range(count // 2):
        missed += math.comb(count, below)
        if 2 * missed / 2**count > 1 - confidence:
            break
        result = below
    return result
