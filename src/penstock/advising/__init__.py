"""Advice from a profile: each flaw with its evidence, the line of code and the gain."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.advising.advice import Advice

if TYPE_CHECKING:
    from penstock.profiling.profiles import Profile

__all__ = ["Advice", "advise"]


def advise(source: Profile | str | os.PathLike[str]) -> list[Advice]:
    """Advice on what could be faster or smaller, from a finished profile or a saved trace.

    The greatest gain comes first; an empty list means that no change would be worthwhile.

    >>> with ps.profile() as profile:
    ...     _ = (ps.ones(4) + 1).numpy()
    >>> all(advice.change for advice in ps.advise(profile))
    True
    """
    from penstock.advising.judging import judged  # imported late: few programs need it

    return judged(source)
