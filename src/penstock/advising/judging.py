"""All rules over one source of evidence: a profile, or the trace that one has saved."""

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

# Causes stand before what follows from them: a line that one rule has named is left alone by the others.
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
    """What all rules say about some devices; what saves the greatest share comes first."""
    several = len(devices) > 1
    ranked: list[tuple[float, Advice]] = []
    for evidence in devices:
        for finding in findings(evidence):
            said = finding.advice
            named = replace(said, evidence=f"{evidence.device}: {said.evidence}") if several else said
            ranked.append((_share(said, evidence), named))
    return [said for _, said in sorted(ranked, key=lambda pair: -pair[0])]


def findings(evidence: Evidence) -> list[Finding]:
    """What the rules say about one device, each line at most once."""
    found: list[Finding] = []
    blamed: set[str] = set()
    for rule in RULES:
        for finding in rule(evidence):
            if finding.advice.where not in blamed:
                found.append(finding)
        blamed.update(line for finding in found for line in finding.lines)
    return found


def _share(said: Advice, evidence: Evidence) -> float:
    """The part of the time, or of the memory, that an advice would save."""
    if said.seconds is not None:
        return said.seconds / (evidence.seconds or 1.0)
    return (said.nbytes or 0) / (evidence.taken_bytes or 1)


def _of_trace(path: Path) -> list[Evidence]:
    if not path.is_file():
        raise NoEvidence(f"there is no file {str(path)!r}; ps.profile(path) writes one")
    try:
        records = parse_json(read_text(path, MOST_OF_A_TRACE))["otherData"]["evidence"]
        return [restored(record) for record in records]
    except (OSError, ValueError, KeyError, TypeError):
        raise NoEvidence(f"{str(path)!r} is no trace that this version's ps.profile has saved") from None
