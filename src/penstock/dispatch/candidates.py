"""Where a graph might run, with prices: on a single device, or in two parts on two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from penstock.dispatch.cutting import best_cut, cut
from penstock.dispatch.moving import move_seconds
from penstock.dispatch.placements import Candidate, Placement
from penstock.dispatch.pricing import price
from penstock.errors import DeviceError
from penstock.graph.node import Node
from penstock.measuring.rates import Rates
from penstock.runtime import Device

CUT_GAIN = 0.9  # a cut has to take less than this part of the best placement without one


def candidates(nodes: Sequence[Node], rates: Mapping[Device, Rates]) -> list[Candidate]:
    """The graph on each device that can compute it, and the best cut if that seems to be sooner."""
    host = next((rates[member] for member in rates if member.capabilities.kind == "host"), None)
    prices = {
        member: priced
        for member in rates
        if (priced := price(nodes, member, rates[member], host or rates[member])) is not None
    }
    wholes = [Candidate(Placement(member), priced.seconds) for member, priced in prices.items()]
    if not wholes:
        raise DeviceError("none of the devices can compute this")
    least = min(candidate.estimated for candidate in wholes)
    cuts = []
    for first, before in prices.items():
        for second, after in prices.items():
            if first is not second:
                moving = partial(move_seconds, first, second, rates)
                count, seconds = best_cut(nodes, before, after, moving)
                if seconds < CUT_GAIN * least:
                    cuts.append((seconds, Placement(first, second, count)))
    for _, placement in sorted(cuts, key=lambda priced: priced[0]):
        candidate = _priced_cut(nodes, placement, rates, host)
        if candidate is not None and candidate.estimated < CUT_GAIN * least:
            return [*wholes, candidate]
    return wholes


def _priced_cut(
    nodes: Sequence[Node], placement: Placement, rates: Mapping[Device, Rates], host: Rates | None
) -> Candidate | None:
    first, second = placement.first, placement.second
    parts = cut(nodes, placement.count)
    if parts is None or second is None:
        return None
    before = price(parts.heads, first, rates[first], host or rates[first])
    after = price(parts.tails, second, rates[second], host or rates[second])
    if before is None or after is None:
        return None
    moved = sum(move_seconds(first, second, rates, node.nbytes) for node in parts.crossing)
    return Candidate(placement, before.seconds + moved + after.seconds, moved)
