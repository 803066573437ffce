"""Rules about waiting and copying: work of host and device that does not overlap, or is needless."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.advising.measures import LEAST_TIME, OFTEN, Finding, finding, of_time, users_own
from penstock.formatting import format_bytes, format_seconds
from penstock.profiling.evidence import Evidence
from penstock.profiling.words import short_location

_READS = ("download", "view", "sync")  # waits that a line causes; the others come from back-pressure
_WORTH_A_THREAD = 1e-3  # seconds for a batch: less is lost in switching between Python's threads


def round_trips(evidence: Evidence) -> Iterator[Finding]:
    """The device waits while values go to the host and back."""
    for transfer in evidence.transfers:
        saved = transfer.returned_seconds
        if transfer.returned >= OFTEN and saved >= LEAST_TIME * evidence.working_seconds:
            nbytes = transfer.nbytes * transfer.returned // transfer.calls
            yield finding(
                "round-trip",
                "Values go to the host and come back",
                f"{transfer.returned} times, values that were read here were made a tensor at "
                f"{short_location(transfer.where)}, {format_bytes(nbytes)} in all; the device waited "
                f"{format_seconds(saved)}",
                transfer.source,
                "do on the device what NumPy does in between (ps.clip, ps.where, ps.sort ... have its names)",
                of_time(saved, evidence.working_seconds),
                saved,
                also=(transfer.where,),
            )


def repeated_uploads(evidence: Evidence) -> Iterator[Finding]:
    """An array that does not change need be sent only once."""
    for transfer in evidence.transfers:
        saved = transfer.seconds * transfer.repeated / transfer.calls if transfer.calls else 0.0
        if transfer.repeated >= OFTEN and saved >= LEAST_TIME * evidence.working_seconds:
            nbytes = transfer.nbytes * transfer.repeated // transfer.calls
            yield finding(
                "repeated-upload",
                "The same array is sent repeatedly",
                f"{transfer.repeated} of {transfer.calls} times this line sent what it had sent before, "
                f"{format_bytes(nbytes)} in all",
                transfer.where,
                "make the tensor once, before the loop",
                of_time(saved, evidence.working_seconds),
                saved,
            )


def hidden_waits(evidence: Evidence) -> Iterator[Finding]:
    """Reading a value waits for the device, and then the device waits for the host."""
    for wait in evidence.waits:
        # Without the wait, both would work at the same time, which saves the shorter of the two times. If the
        # same cores do both, the host's work is spread over them instead.
        shared = 1 / evidence.units if evidence.kind == "cpu" else 0.0
        saved = min(wait.idle_seconds * (1 - shared), wait.seconds)
        if wait.why not in _READS or wait.count < OFTEN or not users_own(wait.where, wait.called):
            continue
        if saved >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "hidden-wait",
                "The host waits for the device, and then the device for the host",
                f"{wait.count} waits ({wait.why}, by {wait.called.rpartition(':')[2]}) took "
                f"{format_seconds(wait.seconds)}; after them the device had nothing to do for "
                f"{format_seconds(wait.idle_seconds)}",
                wait.where,
                "read results later or less often: keep the tensors and read them after the loop, or every "
                "hundredth; numpy_async() asks for values without waiting",
                of_time(saved, evidence.working_seconds),
                saved,
                also=tuple(
                    transfer.where for transfer in evidence.transfers
                ),  # then made while the device computes
            )


def late_data(evidence: Evidence) -> Iterator[Finding]:
    """Batches that another thread makes are ready when the thread that runs the steps needs them.

    Kernels overlap with the host anyway, so the saving is limited to the other work of that thread.
    """
    whole, busy = evidence.working_seconds, evidence.busy_seconds
    for transfer in evidence.transfers if busy is not None else ():
        assert busy is not None
        new = transfer.calls - transfer.beside - transfer.repeated - transfer.returned
        if (
            new < OFTEN
            or transfer.least_seconds < _WORTH_A_THREAD
            or not users_own(transfer.where, transfer.called)
        ):
            continue
        spent = (transfer.seconds + transfer.made_seconds) * new / transfer.calls
        saved = whole - max(spent, whole - spent, busy)
        if saved >= LEAST_TIME * whole:
            yield finding(
                "late-data",
                "Batches are made and sent between the steps, and not beside them",
                f"making and sending {transfer.calls} arrays ({format_bytes(transfer.nbytes)}) took "
                f"{format_seconds(spent)} "
                f"of the thread that also runs the steps; the device had nothing to do for "
                f"{format_seconds(whole - busy)}",
                transfer.where,
                "let ps.data.Prefetch(batches) make and send them ahead, in a thread of its own",
                of_time(saved, whole),
                saved,
            )


def stragglers(evidence: Evidence) -> Iterator[Finding]:
    """Ranks wait for the slowest, which waits least itself."""
    waits = evidence.rank_waits
    if len(waits) < 2:
        return
    slow = waits.index(min(waits))
    others = sorted(wait for rank, wait in enumerate(waits) if rank != slow)
    saved = others[len(others) // 2] - waits[slow]
    if saved >= LEAST_TIME * evidence.working_seconds:
        yield finding(
            "straggler",
            f"The other ranks wait for rank {slow}",
            f"rank {slow} waited {format_seconds(waits[slow])} for the others, and they "
            f"{format_seconds(others[0])} to {format_seconds(others[-1])} for it",
            "(slow rank)",
            f"look at the machine of rank {slow}: another program, fewer cores, a slower device, link or "
            "disk. Ranks share a batch evenly, so the slowest sets the pace",
            of_time(saved, evidence.working_seconds),
            saved,
        )


def exposed_exchanges(evidence: Evidence) -> Iterator[Finding]:
    """Ranks wait for bytes on their way, while they could compute: also the last, which waits for nobody."""
    waited = min([evidence.waited_for_ranks, *evidence.rank_waits])
    if evidence.ranks > 1 and waited >= LEAST_TIME * evidence.working_seconds:
        every = " even of the rank that waited least" if evidence.rank_waits else ""
        yield finding(
            "exposed-exchange",
            "The program waits for exchanges between ranks",
            f"exchanges of {format_bytes(evidence.sent_bytes)} with {evidence.ranks - 1} other ranks took "
            f"{format_seconds(evidence.exchanged_seconds)}, and the program{every} waited "
            f"{format_seconds(waited)} of that",
            "(ranks)",
            "give each rank more to compute between exchanges: a larger batch, or more of them for a step "
            "(accumulate); or smaller buckets, which are sent earlier",
            of_time(waited, evidence.working_seconds),
            waited,
        )
