"""Counters and histograms of a server, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from penstock.models import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_PER_TOKEN = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Histogram:
    """How many values there were up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The samples of the metric."""
        with self._lock:
            counts, whole = list(self._counts), self._sum
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {whole!r}"
        yield f"{name}_count {total}"


class Metrics:
    """What is counted beside the engine's own figures."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.first_token = Histogram(_FIRST_TOKEN)
        self.per_token = Histogram(_PER_TOKEN)

    def text(self, stats: EngineStats) -> str:
        """All metrics, with the figures of the engine."""
        return "\n".join((*self._requests(), *_engine(stats), *self._histograms(), ""))

    def _requests(self) -> Iterator[str]:
        yield from _head(
            "penstock_http_requests_total", "counter", "Requests by path and status; 499: the client left."
        )
        for (path, status), count in sorted(self.requests.items()):
            yield f'penstock_http_requests_total{{path="{path}",status="{status}"}} {count}'

    def _histograms(self) -> Iterator[str]:
        for name, text, histogram in (
            (
                "time_to_first_token",
                "Seconds from a request to the first token of an answer.",
                self.first_token,
            ),
            ("time_per_token", "Seconds from a token of an answer to the next.", self.per_token),
        ):
            whole = f"penstock_{name}_seconds"
            yield from _head(whole, "histogram", text)
            yield from histogram.lines(whole)


_GAUGES: Mapping[str, tuple[str, str]] = {
    "slots": ("slots", "Sequences that are generated at a time, at most."),
    "running": ("sequences_running", "Sequences that are generated now."),
    "waiting": ("sequences_waiting", "Sequences in the queue."),
    "pages": ("pages", "Pages of keys and values."),
    "pages_used": ("pages_used", "Pages that sequences hold."),
    "page_bytes": ("page_bytes", "Bytes of a page."),
    "programs": ("programs", "Programs that are built, or will be by a step that waits for them."),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "requests": ("sequences", "Sequences that were submitted."),
    "finished": ("sequences_finished", "Sequences that came to their end."),
    "cancelled": ("sequences_cancelled", "Sequences that were cancelled."),
    "preempted": ("sequences_preempted", "Times that a sequence gave up its pages for others."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generated_tokens": ("generated_tokens", "Tokens that were generated."),
    "prefix_tokens": ("prefix_tokens", "Tokens of prompts whose keys and values were there already."),
    "steps": ("steps", "Steps of the engine."),
}


def _engine(stats: EngineStats) -> Iterator[str]:
    for kind, suffix, table in (("gauge", "", _GAUGES), ("counter", "_total", _COUNTERS)):
        for attribute, (name, text) in table.items():
            whole = f"penstock_{name}{suffix}"
            yield from _head(whole, kind, text)
            yield f"{whole} {getattr(stats, attribute)}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
