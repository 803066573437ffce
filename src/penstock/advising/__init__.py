"""What a profile says that could be better: each flaw with its evidence, the line of code and the gain."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.advising.advice import Advice

if TYPE_CHECKING:
    from penstock.profiling.profiles import Profile

__all__ = ["Advice", "advise"]


def advise(source: Profile | str | os.PathLike[str]) -> list[Advice]:
    """What could be faster or smaller, by a profile that is over or a trace that one saved.

    The greatest gain comes first; a list without items means that nothing would be worth the change.
    """
    from penstock.advising.judging import judged  # imported late: few programs need it

    return judged(source)
