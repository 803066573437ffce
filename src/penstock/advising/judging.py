"""Applies all rules to a source of evidence: a profile or a saved trace."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.advising import computing, holding, moving
from penstock.advising.advice import Advice
from penstock.advising.measures import Finding, Rule
from penstock.errors import NoEvidence
from penstock.files import MOST_OF_A_TRACE, parse_json, read_text
from penstock.profiling.evidence import Evidence, measured, restored
from penstock.profiling.profiles import Profile

# Causes come before their consequences: a line that a rule has named is ignored by later rules.
RULES: tuple[Rule, ...] = (
    computing.changing_shapes,
    computing.wide_dtypes,
    computing.host_operations,
    moving.round_trips,
    moving.repeated_uploads,
    computing.computed_twice,
    computing.forced_realization,
    computing.raw_kernels,
    computing.unjitted_steps,
    computing.small_operations,
    moving.hidden_waits,
    computing.small_batches,
    moving.late_data,
    moving.stragglers,
    moving.exposed_exchanges,
    computing.half_precision,
    holding.growing_memory,
    holding.pool_misses,
    holding.idle_memory,
    holding.tight_memory,
)


def judged(source: Profile | str | os.PathLike[str]) -> list[Advice]:
    """See `advise`."""
    if isinstance(source, Profile):
        return advice(source.evidence())
    return advice([measured(evidence) for evidence in _of_trace(Path(source))])


def advice(devices: list[Evidence]) -> list[Advice]:
    """The advice of all rules about devices; the greatest share of time or memory comes first."""
    several = len(devices) > 1
    ranked: list[tuple[float, Advice]] = []
    for evidence in devices:
        for finding in findings(evidence):
            piece = finding.advice
            named = replace(piece, evidence=f"{evidence.device}: {piece.evidence}") if several else piece
            ranked.append((_share(piece, evidence), named))
    return [piece for _, piece in sorted(ranked, key=lambda pair: -pair[0])]


def findings(evidence: Evidence) -> list[Finding]:
    """The findings of the rules about a device, each line at most once."""
    result: list[Finding] = []
    blamed: set[str] = set()
    for rule in RULES:
        for finding in rule(evidence):
            if finding.advice.where not in blamed:
                result.append(finding)
        blamed.update(line for finding in result for line in finding.lines)
    return result


def _share(advice: Advice, evidence: Evidence) -> float:
    """The share of the time, or of the memory, that a piece of advice would save."""
    if advice.seconds is not None:
        return advice.seconds / (evidence.seconds or 1.0)
    return (advice.nbytes or 0) / (evidence.taken_bytes or 1)


def _of_trace(path: Path) -> list[Evidence]:
    if not path.is_file():
        raise NoEvidence(f"there is no file {str(path)!r}; ps.profile(path) writes one")
    try:
        records = parse_json(read_text(path, MOST_OF_A_TRACE))["otherData"]["evidence"]
        return [restored(record) for record in records]
    except (OSError, ValueError, KeyError, TypeError):
        raise NoEvidence(f"{str(path)!r} is no trace that this version's ps.profile has saved") from None
