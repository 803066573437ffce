"""Runs random programs, and shortens a program that fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Lines = list[str]


class Invalid(Exception):
    """A program that says nothing: a line that it needs was taken away."""


@dataclass
class Outcome:
    """The outcome of a program: its lines, and the error in the last of them, if any."""

    lines: Lines
    wrong: str | None = None
    refused: int = 0  # lines that were refused, as the documentation says


class Fuzzer(Protocol):
    """Makes programs from seeds, and runs programs."""

    def grow(self, seed: int) -> Outcome:
        """Make a program and run it on the way."""

    def run(self, lines: Sequence[str]) -> str | None:
        """What is wrong in a program; None: nothing."""


@dataclass
class Failure:
    seed: int
    wrong: str
    lines: Lines  # of the shortest program that was found

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.wrong}", *self.lines, ""])


@dataclass
class Count:
    programs: int = 0
    operations: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {self.operations} operations, {self.refused} refused as documented, "
            f"{len(self.failures)} failures"
        )


def fuzz(
    fuzzer: Fuzzer,
    first_seed: int,
    *,
    programs: int | None = None,
    seconds: float | None = None,
    most_failures: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Count:
    """Run programs until there were so many, or so long, or so many failures."""
    count, start, told = Count(), time.monotonic(), time.monotonic()
    while programs is None or count.programs < programs:
        now = time.monotonic()
        if seconds is not None and now - start > seconds:
            break
        if now - told > 60:
            told = now
            tell(f"{(now - start) / 60:.0f} min: {count}")
        seed = first_seed + count.programs
        outcome = fuzzer.grow(seed)
        count.programs += 1
        count.operations += len(outcome.lines)
        count.refused += outcome.refused
        if outcome.wrong is not None:
            lines, wrong = shortest(fuzzer, outcome.lines, outcome.wrong)
            count.failures.append(Failure(seed, wrong, lines))
            tell(str(count.failures[-1]))
            if len(count.failures) >= most_failures:
                break
    return count


def shortest(fuzzer: Fuzzer, lines: Lines, wrong: str, most_seconds: float = 120) -> tuple[Lines, str]:
    """The program without every line that it can fail without."""
    end = time.monotonic() + most_seconds
    size = len(lines) // 2
    while size and time.monotonic() < end:
        at, shorter = 0, False
        while at < len(lines) and time.monotonic() < end:
            fewer = lines[:at] + lines[at + size :]
            try:
                result = fuzzer.run(fewer)
            except Invalid:
                result = None
            if result is None:
                at += size
            else:
                lines, wrong, shorter = fewer, result, True
        size = size if shorter else size // 2
    return lines, wrong


def flushed(text: Any) -> None:
    print(text, flush=True)
    sys.stdout.flush()
