"""Several ranks on this machine: the link between them, what a step waits for it, and how training scales.

    python benchmarks/parallel.py [--ranks 2] [--steps 30] [--device opencl] [--save FILE]
    python benchmarks/parallel.py --nccl          # on a CUDA device: NCCL with one rank, against no exchange
    python benchmarks/parallel.py --published     # what the planner says of runs that others have published

Every rank has a core of its own, to which all of its threads are pinned. The link's rate is that of
all-to-all and all-gather of MPI on 16 MiB; the cost of a step's exchanges, of the rank that came last and
waited for nobody, is compared with what their bytes take at that rate. The best of several rounds counts.
What `penstock plan --ranks` predicts, from the rates of one core and that link, stands beside what was
measured. Where ranks share their cores with other programs, only the times of CPUs tell how training would
scale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np

import penstock as ps
import penstock.distributed
import penstock.nn
import penstock.optim
from measuring import Report
from penstock.cli.launching import launcher
from penstock.collectives.engine import Engine
from penstock.collectives.world import communicator
from penstock.execution.memory_plan import MemoryPlan
from penstock.train.scaling import predicted

ROUNDS = 5
BATCH, CONTEXT = 32, 64
LINK = 16 << 20  # bytes
MIB = 1 << 20


class Training:
    """A GPT whose step runs on the ranks that there are."""

    def __init__(self, exact: bool, width: int = 128) -> None:
        ps.random.manual_seed(0)
        self.model = ps.nn.GPT(256, CONTEXT, width, 2, 4, 0.0)
        self.optimizer = ps.distributed.DataParallel(
            ps.optim.AdamW(self.model.parameters(), lr=1e-3), shards=2, exact=exact, bucket="512KiB"
        )
        self.step = ps.jit(self._step)
        tokens = np.random.default_rng(0).integers(0, 256, (BATCH, CONTEXT + 1))
        self.tokens = ps.asarray(tokens.astype(np.int32))

    def _step(self, tokens: ps.Tensor) -> ps.Tensor:
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def run(self, steps: int) -> float:
        """Seconds of a step."""
        start = perf_counter()
        for _ in range(steps):
            loss = self.optimizer.train(self.step, self.tokens)
        loss.wait()
        return (perf_counter() - start) / steps

    def digest(self) -> str:
        """A hash of the weights."""
        arrays = [parameter.numpy().tobytes() for parameter in self.model.parameters()]
        return hashlib.sha256(b"".join(arrays)).hexdigest()[:12]


def planned(ranks: int) -> dict[str, Any]:
    """What is predicted of a step on the part of one of several ranks, without exchanges."""
    model = ps.nn.GPT(256, CONTEXT, 128, 2, 4, 0.0)
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    tokens = ps.asarray(np.zeros((BATCH // ranks, CONTEXT + 1), np.int32))
    plan: MemoryPlan = ps.memory.plan(step, tokens)
    assert plan.step_seconds is not None
    return {
        "step_seconds": plan.step_seconds[:1],
        "unlimited_bytes": plan.unlimited_bytes,
        "parameters": sum(parameter.size for parameter in model.parameters()),
    }


def as_rank(steps: int, device: str, of_ranks: int) -> dict[str, Any]:
    """What a rank measures."""
    # Before MPI and PoCL start threads, which inherit it.
    number = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    ps.distributed.init()
    ps.use(device)
    group = communicator()
    result: dict[str, Any] = {"size": group.size}
    row = np.zeros(LINK // 4, np.float32)
    times: dict[str, float] = {}
    for operation in ("all_to_all", "all_gather"):
        part = row if operation == "all_to_all" else row[: row.size // group.size]
        rounds = []
        for _ in range(ROUNDS):
            group.barrier()
            start = perf_counter()
            group.run(operation, part)
            rounds.append(perf_counter() - start)
        times[operation] = min(rounds)
    result["link"] = 2 * LINK * (group.size - 1) / group.size / max(sum(times.values()), 1e-9)
    for exact in (True, False):
        ps.default_device().pool.reset_peak()
        training = Training(exact)
        training.run(3)
        best: dict[str, float] = {}
        for _ in range(ROUNDS):
            traffic = group.traffic
            before = traffic.seconds, traffic.waited_seconds, traffic.sent_bytes, process_time()
            seconds = training.run(steps)
            after = traffic.seconds, traffic.waited_seconds, traffic.sent_bytes, process_time()
            spent, waited, sent, cpu = ((b - a) / steps for a, b in zip(before, after, strict=True))
            if not best or seconds < best["step"]:
                best = {"step": seconds, "exchange": spent, "waited": waited, "sent": sent, "cpu": cpu}
        own = np.array([best["exchange"], best["waited"] / best["exchange"] if best["exchange"] else 0.0])
        ranks = group.run("all_gather", own).reshape(-1, 2)
        best |= {"last": float(ranks[:, 0].min()), "exposed": float(ranks[:, 1].mean())}
        peak = ps.default_device().memory_stats().peak_bytes
        result["exact" if exact else "fast"] = {**best, "weights": training.digest(), "peak": peak}
    if group.size == 1:
        result["plan"] = planned(of_ranks)
    return result


def measured(ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of several measured."""
    own = [sys.executable, __file__, "--as-rank", "--steps", str(given.steps), "--device", given.device]
    own += ["--ranks", str(given.ranks)]
    command = [*launcher(), "-n", str(ranks), *own] if ranks > 1 else own
    environment = {**os.environ, "POCL_MAX_PTHREAD_COUNT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    known: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return known


def compare(report: Report, alone: dict[str, Any], several: dict[str, Any]) -> None:
    """Put what `penstock plan --ranks` predicts beside what was measured, of sums in the engine's order."""
    plan, ranks = alone["plan"], several["size"]
    known: Any = SimpleNamespace(**plan)
    scaling = predicted({0: known}, BATCH // ranks, plan["parameters"], ranks, several["link"])
    one, own = alone["fast"], several["fast"]
    for name, expected, value, size, unit in (
        ("step", scaling.step_seconds, own["step"], 1e-3, "ms"),
        ("step, by CPU time", scaling.compute_seconds, own["cpu"], 1e-3, "ms"),
        ("exchanges", scaling.exchange_seconds, own["last"], 1e-3, "ms"),
        ("memory of a rank", scaling.rank_bytes[0], own["peak"], MIB, "MiB"),
        ("efficiency", scaling.efficiency, one["step"] / own["step"] / ranks, 1e-2, "%"),
        ("efficiency, by CPU time", scaling.efficiency, one["cpu"] / own["cpu"] / ranks, 1e-2, "%"),
    ):
        detail = f"{expected / size:.1f} {unit} predicted, {expected / value - 1:+.0%}"
        report.add(f"fast: {name}", value / size, unit, "", None, detail)


@dataclass(frozen=True)
class Published:
    """How a training that others measured scaled, by data parallelism alone."""

    what: str
    parameters: float
    step_seconds: float  # of the fewest ranks
    link: float  # bytes per second that leave a machine, or a rank within one
    efficiencies: dict[int, float]  # by the number of ranks, against the fewest


PUBLISHED = (
    # github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling, experiments 1, 2 and 4; NVLink.
    Published("KempnerForge, Llama of 8B, FSDP, H200", 8.03e9, 3.13, 450e9, {2: 0.89, 4: 0.93}),
    # github.com/mosaicml/llm-foundry, scripts/train/benchmarking: 6 x 2048 tokens a GPU, 10,643 a second of
    # each of 8. The link is not told; eight adapters of 400 Gb/s are usual.
    Published(
        "MosaicML, MPT-7B, FSDP, H100",
        6.66e9,
        6 * 2048 / 10_643,
        400e9,
        {128: 10_475 / 10_643, 256: 10_119 / 10_643, 512: 9_670 / 10_643},
    ),
)


def published() -> None:
    """Put what the planner predicts beside what others measured."""
    report = Report()
    for known in PUBLISHED:
        plan: Any = SimpleNamespace(step_seconds=(known.step_seconds,), unlimited_bytes=0)
        for ranks, measured in known.efficiencies.items():
            scaling = predicted({0: plan}, 1, int(known.parameters), ranks, known.link)
            detail = (
                f"{100 * scaling.efficiency:.1f}% predicted; {scaling.exchange_seconds:.2f} s of exchanges"
            )
            report.add(f"{known.what}, {ranks} ranks", 100 * measured, "%", "", None, detail)


def nccl() -> None:
    """NCCL with one rank: the same bits as without it, and what it takes."""
    from penstock.collectives.nccl import NCCLEngine

    device = ps.use("cuda")
    alone = Training(exact=True, width=512)
    before = alone.run(20), alone.digest()
    ps.distributed.init(NCCLEngine(Engine(), int(device.name.partition(":")[2] or 0)))
    several = Training(exact=True, width=512)
    after = several.run(20), several.digest()
    operations = ps.distributed.traffic().operations
    print(f"without: {1e3 * before[0]:.2f} ms a step, weights {before[1]}")
    print(f"NCCL:    {1e3 * after[0]:.2f} ms a step, weights {after[1]}, {operations} operations")
    if before[1] != after[1] or not operations:
        raise SystemExit("NCCL changed the weights, or moved nothing")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.nccl or given.published:
        nccl() if given.nccl else published()
        return
    if given.as_rank:
        result = as_rank(given.steps, given.device, given.ranks)
        if ps.distributed.rank() == 0:
            print(json.dumps(result))
        return
    report = Report()
    alone, several = measured(1, given), measured(given.ranks, given)
    link = several["link"]
    report.add(
        "link, 16 MiB rows", link / MIB, "MiB/s", "", None, f"{given.ranks} ranks, MPI on this machine"
    )
    for name in ("exact", "fast"):
        own, one = several[name], alone[name]
        at_link = own["sent"] / link
        sent = f"{own['sent'] / MIB:.2f} MiB sent a step"
        report.add(f"{name}: exchanges of a step", 1e3 * own["last"], "ms", "", None, sent)
        report.add(f"{name}: at the link's rate", own["last"] / at_link, "x", "", None, "of these bytes")
        hidden = 1 - own["exposed"]
        report.add(f"{name}: hidden behind the backward pass", 100 * hidden, "%", "", None, "with skew")
        speed = one["step"] / own["step"]
        detail = f"{1e3 * one['step']:.1f} ms with 1 core, {1e3 * own['step']:.1f} ms with {given.ranks}"
        report.add(f"{name}: {given.ranks} ranks of a core against 1", speed, "x", "", None, detail)
        cpu = f"{1e3 * one['cpu']:.1f} ms, and {1e3 * own['cpu']:.1f} ms of a rank"
        report.add(
            f"{name}: CPU time of a step, 1 rank over each", one["cpu"] / own["cpu"], "x", "", None, cpu
        )
    compare(report, alone, several)
    same = alone["exact"]["weights"] == several["exact"]["weights"]
    report.add("exact: weights of 1 rank", float(same), "", "1", same, several["exact"]["weights"])
    if given.save:
        report.save(given.save, "parallel", ps.use(given.device), {}, f" --ranks {given.ranks}")


if __name__ == "__main__":
    main()
