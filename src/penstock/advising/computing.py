"""Rules about computing: too little at a time, repeatedly, in the wrong dtype or on the wrong side."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.advising.measures import (
    LEAST_TIME,
    OFTEN,
    Finding,
    finding,
    least_seconds,
    of_time,
    users_own,
)
from penstock.formatting import format_bytes, format_seconds
from penstock.profiling.evidence import Evidence
from penstock.profiling.lines import WIDE, Runs
from penstock.profiling.words import short_location

_FEW_SHAPES = 4  # lengths to which inputs may be padded, for less than 20% more work on average
_CHANGING = 0.3  # of the runs; in a loop over a few lengths, nearly all are known after the first round
_LONGER = 1.5  # times as many operations; other shapes of the same expression have as many
_STEP = 16  # recorded operations of an expression from which on it is a step, not a single operation
_IN_STEPS = ("nn/module.py", "optim/")  # functions that a step calls, and that may compute what is pending
_LOOP = 2000  # recorded operations in total: nobody writes so many by hand, so they come from a loop
_CHUNKS = 5  # runs: operations whose results are not read are computed many at a time
_STEPS = 40  # runs that make a loop of a step
_MANY = 100  # runs that make a loop of an operation
_PARTS = (
    "nn/",
    "models/",
    "optim/",
)  # they send rates and tokens of their own, which are no batches
_SMALL = 0.1  # of the cost of a launch: work below it is nearly free, so ten times as much would be too
_LARGER = 8  # times a batch, of which the device would hardly notice
_FASTER = 1.5  # the measured speed-up from which on half precision is worth its lower accuracy


def changing_shapes(evidence: Evidence) -> Iterator[Finding]:
    """Programs are built for shapes, and another shape at every run means another program."""
    for where in dict.fromkeys(run.where for run in evidence.runs if users_own(run.where, run.called)):
        runs = [run for run in evidence.runs if run.where == where]
        count, fresh = sum(run.runs for run in runs), sum(run.fresh for run in runs)
        if fresh < OFTEN or fresh < _CHANGING * count:
            continue
        if any(run.most > _LONGER * run.fewest for run in runs):
            continue  # each recording is longer than the last, so shapes are not the reason
        spent = sum(run.costly_seconds for run in runs)
        saved = spent * (1 - _FEW_SHAPES / fresh)
        if saved >= LEAST_TIME * evidence.seconds:
            built = sum(run.built for run in runs)
            yield finding(
                "changing-shapes",
                "Shapes change from run to run, so nothing is used twice",
                f"{fresh} of {count} runs were the first of their shapes; {built} programs were built, and "
                f"{format_seconds(spent)} went into building and first runs",
                where,
                f"pad inputs to a few lengths (powers of two, say): {_FEW_SHAPES} shapes need "
                f"{_FEW_SHAPES} programs",
                of_time(saved, evidence.seconds),
                saved,
            )


def wide_dtypes(evidence: Evidence) -> Iterator[Finding]:
    """NumPy's default is float64, which takes twice the memory of float32, or has no kernel."""
    by_host = [run for run in evidence.runs if any(name.endswith(WIDE) for name in run.host_steps)]
    spent = saved = sum(_waited(run, evidence) for run in by_host)
    for kernel in evidence.kernels:
        if kernel.where == "device" and any(dtype in kernel.shapes for dtype in WIDE):
            rates = [evidence.rate(dtype) for dtype in (kernel.product, "float32")] if kernel.product else []
            share = rates[0] / rates[1] if rates and rates[0] and rates[1] else 0.5  # half the bytes
            spent, saved = spent + kernel.seconds, saved + kernel.seconds * (1 - min(share, 1.0))
    if saved < LEAST_TIME * evidence.working_seconds or not saved:
        return
    wide = [transfer for transfer in evidence.transfers if transfer.dtype in WIDE]
    source = max(wide, key=lambda transfer: transfer.nbytes, default=None)
    user = max(evidence.runs, key=lambda run: run.wide_bytes, default=None)
    sent = f"; {format_bytes(source.nbytes)} of {source.dtype} were sent from this line" if source else ""
    where = source.where if source else user.where if user else ""
    yield finding(
        "wide-dtype",
        "Numbers of 64 bits where 32 would do",
        f"float64 or complex128 took {format_seconds(spent)}, in kernels or because there is none for "
        f"it{sent}",
        where,
        "array.astype(np.float32), or dtype=ps.float32, where 7 digits are enough",
        of_time(saved, evidence.working_seconds),
        saved,
        also=tuple(run.where for run in by_host),
    )


def host_operations(evidence: Evidence) -> Iterator[Finding]:
    """An operation without a kernel waits for the device, is computed by NumPy, and goes back."""
    for run in evidence.runs:
        steps = {name: count for name, count in run.host_steps.items() if not name.endswith(WIDE)}
        times = sum(steps.values())
        if times < OFTEN:
            continue
        spent = _waited(run, evidence)
        if spent >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "host-operation",
                "An operation has no kernel on this device",
                f"{', '.join(sorted(steps))}: {times} times the device waited for NumPy, "
                f"{format_seconds(spent)}",
                run.where,
                "use an operation or a dtype that has one (nearly all do on float32 and int32), or compute "
                "it once, outside of the loop; ps.explain shows it as a step of the host",
                f"at most {format_seconds(spent)} of {format_seconds(evidence.working_seconds)}",
                spent,
            )


def computed_twice(evidence: Evidence) -> Iterator[Finding]:
    """Reading a value computes and keeps only that value: intermediate results are recomputed later."""
    whole = sum(run.operations for run in evidence.runs)
    for run in evidence.runs:
        saved = (evidence.busy_seconds or 0.0) * run.again / whole if whole else 0.0
        if run.runs >= OFTEN and saved >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "computed-twice",
                "The same is computed for two values, one after the other",
                f"{run.again / max(run.operations, 1):.0%} of the operations at "
                f"{short_location(run.where)} had been done before, for the value read here, and not kept",
                run.again_for,
                "compute both together: read the value after the other, or compute both in a @ps.jit",
                of_time(saved, evidence.working_seconds),
                saved,
            )


def forced_realization(evidence: Evidence) -> Iterator[Finding]:
    """`realize()` in a chain prevents fusion there: its result is stored, and read by the next kernel."""
    bandwidth, launches = evidence.rate("bytes"), evidence.rate("launches")
    fuses = evidence.kind != "host"  # with NumPy, every operation stores its result
    for handover in evidence.handovers if fuses and bandwidth and launches else ():
        assert bandwidth
        assert launches
        saved = min(2 * handover.nbytes / bandwidth + handover.count / launches, evidence.working_seconds)
        if handover.count >= OFTEN and saved >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "forced-realization",
                "A chain of operations is cut by realize()",
                f"{handover.count} times, {format_bytes(handover.nbytes)} in all were stored because this "
                f"line requested them, and read at {short_location(handover.into)}",
                handover.where,
                "leave realize() out: what follows joins the same kernel, and nothing is stored in between",
                of_time(saved, evidence.working_seconds),
                saved,
            )


def raw_kernels(evidence: Evidence) -> Iterator[Finding]:
    """A user's raw kernel is not fused with the operations around it."""
    bandwidth = evidence.rate("bytes")
    for run in evidence.runs if bandwidth else ():
        assert bandwidth
        names = tuple(f"{name}_" for name in run.raw_names.split(", ")) if run.raw_names else ()
        own = (
            sum(kernel.seconds for kernel in evidence.kernels if kernel.name.startswith(names))
            if names
            else 0.0
        )
        saved = min(own + run.raw_bytes / bandwidth, evidence.working_seconds)
        if run.runs >= OFTEN and saved >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "raw-kernel",
                "A raw kernel stands between operations that it could be fused with",
                f"{run.raw_names}: {format_seconds(own)}, and {format_bytes(run.raw_bytes)} in {run.runs} "
                f"runs were stored for it or by it, for elementwise operations beside it",
                run.where,
                "write it as a formula with ps.kernel, which joins what is around it",
                of_time(saved, evidence.working_seconds),
                saved,
            )


def small_operations(evidence: Evidence) -> Iterator[Finding]:
    """Launching an operation costs the same for a single item as for ten thousand."""
    bandwidth = evidence.rate("bytes")
    for run in evidence.runs:
        known = run.runs - run.fresh
        if (
            run.how == "jit"
            or known < _MANY
            or run.nodes >= _STEP * run.runs
            or not users_own(run.where, run.called)
        ):
            continue
        work = run.items * 8 / bandwidth if run.how == "numpy" and bandwidth else least_seconds(run, evidence)
        cost = _cost(run, evidence)
        if cost is None or work is None or work > _SMALL * cost:
            continue
        saved = min(cost - work, evidence.working_seconds)
        if saved >= LEAST_TIME * evidence.working_seconds:
            how = "by NumPy, which is sooner done with so little" if run.how == "numpy" else "by the device"
            yield finding(
                "small-operations",
                "Many operations that are too small for the device",
                f"{run.runs} times, {run.items // run.runs} items each, computed {how}: "
                f"{format_seconds(cost)} for {format_seconds(work)} of work",
                run.where,
                "compute all of them at once, with another axis instead of a loop (ps.matmul_batch for "
                "products of several shapes), or the whole loop in a @ps.jit",
                of_time(saved, evidence.working_seconds),
                saved,
            )


def unjitted_steps(evidence: Evidence) -> Iterator[Finding]:
    """Recording an operation costs microseconds at every run; a captured function records nothing."""
    recorded = evidence.rate("recorded operations")
    steps = [run for run in evidence.runs if run.how != "jit" and run.nodes >= _STEP * run.runs]
    steps = [run for run in steps if users_own(run.where, run.called) or run.called.startswith(_IN_STEPS)]
    nodes, count = sum(run.nodes for run in steps), sum(run.runs for run in steps)
    if not recorded or nodes < _LOOP or count < _CHUNKS:
        return
    by_numpy = sum(run.seconds for run in steps if run.how == "numpy")
    # While the device computes, the host may as well record.
    idle = evidence.working_seconds - (evidence.busy_seconds or 0.0)
    saved = min(nodes / recorded + by_numpy, max(idle, 0.0))
    if saved >= 2 * LEAST_TIME * evidence.working_seconds:
        longest = max(steps, key=lambda run: run.nodes)
        yield finding(
            "unjitted-step",
            "The same step is recorded at every run",
            f"{count} runs of {nodes // count} operations each were recorded one by one, at "
            f"{format_seconds(1 / recorded)} for each; most of them were computed at this line",
            longest.where,
            "put the step (forward, backward and the optimizer's) into a function under @ps.jit",
            of_time(saved, evidence.working_seconds),
            saved,
            # Pending operations keep their inputs alive, so memory grows with them.
            also=(*(run.where for run in steps), *(transfer.where for transfer in evidence.transfers)),
        )


def small_batches(evidence: Evidence) -> Iterator[Finding]:
    """A step whose work takes less than a tenth of its launch does more samples in the same time."""
    launches = evidence.rate("launches")
    fed = sum(
        transfer.calls - transfer.repeated
        for transfer in evidence.transfers
        if not transfer.called.startswith(_PARTS)
    )
    least = min(
        (
            kernel.least_seconds
            for kernel in evidence.kernels
            if kernel.where == "device" and kernel.least_seconds
        ),
        default=0.0,
    )
    for run in evidence.runs if launches else ():
        assert launches
        known = run.runs - run.fresh
        # A step that is sent no data has all of them already, so its batch cannot grow.
        if run.how != "jit" or known < _STEPS or fed < run.runs / 2 or run.called.startswith(_PARTS):
            continue
        work = least_seconds(run, evidence)
        cost = run.runs / launches
        if evidence.kind == "gpu":  # whose kernels have a least time of their own
            cost = max(cost, run.launches * least)
        if work is None or work > _SMALL * cost:
            continue
        # The fixed cost of a step: its launches, and sending its data.
        spent = max(cost, run.seconds - run.costly_seconds) + sum(
            transfer.seconds for transfer in evidence.transfers
        )
        saved = min(spent, evidence.working_seconds) * (1 - 1 / _LARGER)
        if saved >= LEAST_TIME * evidence.working_seconds:
            yield finding(
                "small-batches",
                "Batches are too small for the device",
                f"{run.runs} steps of {run.launches / run.runs:.0f} launches: at the device's best their "
                f"work takes {format_seconds(work / run.runs)} a step, and launching it "
                f"{format_seconds(cost / run.runs)}",
                run.where,
                f"a batch of {_LARGER} times as many samples takes about as long for each step",
                f"{of_time(saved, evidence.working_seconds)}, for as many samples in steps of {_LARGER} "
                f"times the batch",
                saved,
            )


def half_precision(evidence: Evidence) -> Iterator[Finding]:
    """Products of float16 or bfloat16 are measured to be faster, on a device that has tensor cores."""
    single, half = evidence.rate("float32"), evidence.rate("bfloat16")
    if not evidence.fast_float16 or not single or not half or half < _FASTER * single:
        return
    spent = sum(kernel.seconds for kernel in evidence.kernels if kernel.product == "float32")
    saved = spent * (1 - single / half)
    if saved < 2 * LEAST_TIME * evidence.working_seconds:
        return
    run = max(evidence.runs, key=lambda run: run.products.get("float32", 0), default=None)
    yield finding(
        "half-precision",
        "Products in float32, on a device that is faster in half precision",
        f"products of float32 took {format_seconds(spent)}; this device computes {half / single:.1f} times "
        f"as many operations a second in bfloat16",
        run.where if run else "",
        "dtype=ps.bfloat16 for the model (optimizers keep float32 masters), or PENSTOCK_TF32=1 for about 3 "
        "digits in products and nothing else changed",
        of_time(saved, evidence.working_seconds),
        saved,
    )


def _waited(run: Runs, evidence: Evidence) -> float:
    """The cost of NumPy's steps: a run with such a step waits for it, while other runs only launch."""
    launches = evidence.rate("launches")
    return max(run.seconds - run.costly_seconds - (run.runs / launches if launches else 0.0), 0.0)


def _cost(run: Runs, evidence: Evidence) -> float | None:
    """The host's time for the runs of a line: measured for NumPy, estimated per run for programs."""
    recorded, launches = evidence.rate("recorded operations"), evidence.rate("launches")
    if not recorded or not launches:
        return None
    own = run.seconds - run.costly_seconds if run.how == "numpy" else run.runs / launches
    return own + run.nodes / recorded
