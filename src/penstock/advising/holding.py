"""Rules about memory: what the pool cannot reuse, what is kept, and what a smaller budget would save."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.advising.measures import LEAST_MEMORY, LEAST_TIME, Finding, finding, of_time, users_own
from penstock.formatting import format_bytes, format_seconds
from penstock.profiling.evidence import Evidence

_HITS = 0.6  # of the requests; a loop with constant sizes has nearly all
_REQUESTS = 100  # that went to the driver: the first allocation of a size is never in the pool
_KEPT = 40  # blocks that a line holds, from which on it is a loop that keeps them
_EVEN = 0.1  # of them, in each quarter of the runs: blocks from the start that are held are no growth
_MUCH = 64 << 20  # bytes that are worth a change of the program
_IDLE = 0.25  # of the memory that was taken
_TIGHT = 0.9  # of the limit
_FORWARD = 1 / 3  # of a training step's kernels: the backward pass has two products for each of the forward


def pool_misses(evidence: Evidence) -> Iterator[Finding]:
    """Memory from the driver costs many times what idle memory does."""
    requests = evidence.pool_hits + evidence.pool_misses
    if evidence.pool_misses < _REQUESTS or evidence.pool_hits >= _HITS * requests:
        return
    spent = sum(miss.seconds for miss in evidence.misses)
    worst = max(evidence.misses, key=lambda miss: (miss.seconds, miss.count), default=None)
    if worst is None or spent < LEAST_TIME * evidence.working_seconds:
        return
    kept = {kept.where: kept.blocks for kept in evidence.keeping}
    if worst.sizes > worst.count / 2:
        cause = f"they have {worst.sizes} different sizes"
        change = "ask for a few sizes only: pad what changes its length"
    elif kept.get(worst.where, 0) > worst.count / 2:
        cause = "nothing of it was let go"
        change = "let go of what is not needed any more: the pool then serves the next request"
    elif 2 * evidence.given_back_bytes < sum(miss.nbytes for miss in evidence.misses):
        return  # so much is in use at the same time, for example by pending steps
    else:
        cause = "what came back to the pool was given back to the driver"
        change = (
            "let the pool keep more: PENSTOCK_POOL_BYTES, PENSTOCK_POOL_CAPACITY, PENSTOCK_POOL_SECONDS; "
            "call ps.memory.trim() less often, and set limit_bytes higher"
        )
    yield finding(
        "pool-misses",
        "Memory is repeatedly taken from the driver",
        f"{evidence.pool_hits / requests:.0%} of {requests} requests were served from the pool; this line's "
        f"{worst.count} others took {format_seconds(worst.seconds)}, as {cause}",
        worst.where,
        change,
        of_time(spent, evidence.working_seconds),
        spent,
    )


def growing_memory(evidence: Evidence) -> Iterator[Finding]:
    """Results that a loop keeps take more memory with every step."""
    called = {transfer.where: transfer.called for transfer in evidence.transfers}
    called |= {run.where: run.called for run in evidence.runs}
    for kept in evidence.keeping:
        if not users_own(kept.where, called.get(kept.where, "")):
            continue  # the parameters of a model are kept on purpose
        saved = kept.nbytes - kept.nbytes // max(kept.blocks, 1)
        even = min(kept.quarters, default=0) >= _EVEN * kept.blocks
        if kept.blocks >= _KEPT and even and saved >= LEAST_MEMORY * evidence.peak_bytes:
            yield finding(
                "growing-memory",
                "Memory grows with every step",
                f"{kept.blocks} blocks of this line, {format_bytes(kept.nbytes)}, came one after another, "
                f"and none was let go",
                kept.where,
                "keep values and not tensors (loss.item() now and then, or x.numpy()), and detach() what is "
                "kept from its gradient",
                f"about {format_bytes(saved)} of {format_bytes(evidence.peak_bytes)}",
                nbytes=saved,
            )


def idle_memory(evidence: Evidence) -> Iterator[Finding]:
    """Memory that is idle in the pool could be used by other programs."""
    saved = evidence.taken_bytes - evidence.peak_bytes
    if saved < _MUCH or saved < _IDLE * evidence.taken_bytes:
        return
    if evidence.limit_bytes is not None and evidence.limit_bytes <= evidence.peak_bytes / _TIGHT:
        return  # it is set already
    count = sum(miss.count for miss in evidence.misses)
    each = sum(miss.seconds for miss in evidence.misses) / count if count else 0.0
    cost = evidence.tight_misses * each
    yield finding(
        "idle-memory",
        "Much of the memory that is taken is never in use at once",
        f"{format_bytes(evidence.taken_bytes)} were taken from the driver, and at most "
        f"{format_bytes(evidence.peak_bytes)} were in use at any moment",
        "",
        f'device.limit_bytes = "{-(-evidence.peak_bytes // (1 << 20))}MiB", or ps.memory.trim() between the '
        f"phases of the program",
        f"{format_bytes(saved)} of {format_bytes(evidence.taken_bytes)}, for {evidence.tight_misses} more "
        f"allocations ({format_seconds(cost)})",
        nbytes=saved,
    )


def tight_memory(evidence: Evidence) -> Iterator[Finding]:
    """Near the limit, values that are kept for the gradient can be recomputed instead."""
    limit = evidence.limit_bytes or evidence.total_bytes
    run = max(evidence.runs, key=lambda run: run.kept_bytes, default=None)
    if run is None or evidence.peak_bytes < _TIGHT * limit:
        return
    saved = run.kept_bytes
    if saved < LEAST_MEMORY * evidence.peak_bytes:
        return
    recomputing = (evidence.busy_seconds or 0.0) * _FORWARD
    cost = f", for about {format_seconds(recomputing)} more of kernels" if recomputing else ""
    yield finding(
        "tight-memory",
        "The memory is nearly used up by what waits for its gradient",
        f"{format_bytes(evidence.peak_bytes)} of {format_bytes(limit)} were in use; "
        f"{format_bytes(saved)} of it are results of the forward pass that this step keeps",
        run.where,
        "ps.checkpoint around the parts of the model recomputes them in the backward pass; a smaller "
        "batch, or dtype=ps.bfloat16, needs less too",
        f"up to {format_bytes(saved)} of {format_bytes(evidence.peak_bytes)}{cost}",
        nbytes=saved,
    )
