"""Training steps inside memory budgets, beside PyTorch and JAX: plain, and with a checkpoint per block.

    python benchmarks/budget.py [--device opencl:0] [--model nano] [--compile] [--alone] [--save FILE]
    python benchmarks/budget.py --only 100% 50% torch jax       # two budgets and two peers
    python benchmarks/budget.py --within 8GiB 24GiB             # the largest batch inside, and its speed
    python benchmarks/budget.py --within 24GiB --batch 680      # the speed of a batch

The budgets are shares of what the step takes without a budget, and the smallest that would do, in turn. Each
peer trains the same model in turn with the step without a budget, one peer after the other, as all of them
would not fit; all is in one process, and a ratio of time is that to the step without a budget. Memory is what
the driver has given out; PyTorch's is what its allocator has reserved, on CUDA only; JAX's what XLA plans. On
CUDA, or with --compile, PyTorch is also compiled with `activation_memory_budget`, its own knob for the bytes
that are saved for the gradient.

With a file that describes a device, such as h200.toml, --within only plans. So the time of a device is spent
on steps: the largest batch may compute so much again that one takes seconds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import jax_gpt
import penstock as ps
import penstock.nn
import penstock.optim
from measuring import Report, Sides, best_of, installed
from penstock.bench.steps import Gpt, torch_gpt
from penstock.config import parse_bytes
from penstock.errors import OutOfDeviceMemory
from penstock.execution.memory_plan import MemoryPlan

MODELS = {
    "nano": Gpt(2048, 128, 128, 4, 4, 16),
    "gpt2-124M": Gpt(50304, 1024, 768, 12, 12, 16),
    "gpt-1.5B": Gpt(50304, 1024, 1600, 48, 25, 4),
}
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25)
KNOBS = (0.5, 0.2, 0.0)  # of PyTorch
RATE = 3e-4
STEPS = 3  # of each side in a round
SMALLEST = "the smallest"
MIB = 1 << 20
SLACK = 128 << 10  # bytes above the smallest budget, for losses and other small tensors

Side = tuple[Callable[[], Any], int]  # some training steps of a peer, and its bytes, if they are known

torch = installed("torch")
checkpoint = installed("torch.utils.checkpoint")


class Budgets:
    """A model, and its step under several budgets."""

    def __init__(self, sizes: Gpt, tokens: Any, device: ps.Device) -> None:
        ps.random.manual_seed(0)
        self.device = device
        self.model: Any = ps.nn.GPT(sizes.vocab, sizes.context, sizes.width, sizes.layers, sizes.heads)
        if device.capabilities.matmul_library:
            self.model.to(ps.bfloat16)
        self.optimizer = ps.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01)
        self.tokens = ps.asarray(tokens, device=device)

    def step(self, memory: int | None) -> Callable[[ps.Tensor], ps.Tensor]:
        @ps.jit(memory=memory)
        def step(tokens: ps.Tensor) -> ps.Tensor:
            loss: ps.Tensor = self.model.loss(tokens[:, :-1], tokens[:, 1:])
            self.optimizer.backward(loss)
            self.optimizer.step()
            return loss

        return step

    def side(self, memory: int, steps: int = STEPS) -> Callable[[], None]:
        step = self.step(memory)

        def run() -> None:
            for _ in range(steps):
                step(self.tokens)
            self.device.sync()

        return run

    def physical_bytes(self, run: Callable[[], object]) -> int:
        """The bytes that the driver has allocated after some steps, when arenas and results exist."""
        gc.collect()
        self.device.cleanup()
        run()
        stats = self.device.memory_stats()
        return stats.driver_bytes - stats.staging_bytes


def digest(sizes: Gpt, tokens: Any, device: ps.Device, memory: int) -> str:
    """The losses and the parameters of a new model after two steps."""
    ours = Budgets(sizes, tokens, device)
    step = ours.step(memory)
    losses = [step(ours.tokens).numpy() for _ in range(2)]
    parameters = [parameter.numpy() for parameter in ours.model.parameters()]
    return hashlib.sha256(b"".join(array.tobytes() for array in (*losses, *parameters))).hexdigest()


def torch_side(sizes: Gpt, tokens: Any, cuda: bool, how: str, knob: float = 1.0) -> Callable[[], None]:
    """PyTorch's step: `how` is plain, checkpoint (each block) or compiled (with its own budget)."""
    where = "cuda" if cuda else "cpu"
    model = torch_gpt(torch, sizes).to(where)
    if how == "checkpoint":
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint.checkpoint(inner, x, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    ids = torch.from_numpy(tokens).to(where)

    def loss_of(ids: Any) -> Any:
        with torch.autocast(where, dtype=torch.bfloat16, enabled=cuda):
            logits = model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    if how == "compiled":
        torch.compiler.reset()
        torch._functorch.config.activation_memory_budget = knob
        loss_of = torch.compile(loss_of, dynamic=False)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss_of(ids).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()

    return run


def torch_held() -> int:
    """The bytes in use by PyTorch's allocator, on CUDA."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def torch_peak(run: Callable[[], None]) -> int:
    """The peak of PyTorch's allocator during some steps, on CUDA."""
    torch_held()
    torch.cuda.reset_peak_memory_stats()
    run()
    return int(torch.cuda.max_memory_reserved())


def torch_peer(sizes: Gpt, tokens: Any, cuda: bool, how: str, knob: float) -> Side:
    held = torch_held() if cuda else 0
    run = torch_side(sizes, tokens, cuda, how, knob)
    run()  # compiles, with the knob as it is now
    return run, torch_peak(run) - held if cuda else 0


def peers(sizes: Gpt, tokens: Any, cuda: bool, compiles: bool) -> dict[str, Callable[[], Side]]:
    """What makes the sides of PyTorch and JAX. JAX's allocator keeps its memory, so these come last."""
    makers: dict[str, Callable[[], Side]] = {}
    if torch is not None:
        kinds = {"torch": ("plain", 1.0), "torch, checkpoints": ("checkpoint", 1.0)}
        if compiles:
            kinds |= {f"torch compiled, {knob:g}": ("compiled", knob) for knob in (1.0, *KNOBS)}
        for name, (how, knob) in kinds.items():
            makers[name] = partial(torch_peer, sizes, tokens, cuda, how, knob)
    if jax_gpt.jax is not None and (not cuda or jax_gpt.jax.default_backend() == "gpu"):
        for name, checkpoints in {"jax": False, "jax, checkpoints": True}.items():
            makers[name] = partial(jax_gpt.side, sizes, tokens, RATE, STEPS, cuda, checkpoints)
    return makers


def beside(ours: Callable[[], Any], make: Callable[[], Side]) -> tuple[float, float, int]:
    """Seconds of our steps and of a peer's, in turn, and the peer's bytes. Its model is gone afterwards."""
    run, nbytes = make()
    best = best_of({"ours": ours, "peer": run}, rounds=5)
    del run
    if torch is not None and torch.cuda.is_available():
        torch_held()  # its allocator would keep what the next peer needs
    return best["ours"], best["peer"], nbytes


def limits_of(sizes: Gpt, tokens: Any, device: ps.Device, only: list[str]) -> dict[str, int]:
    """The budgets by name. All are planned, which takes a while, only where the smallest is wanted."""
    ours = Budgets(sizes, tokens, device)
    plan = ps.memory.plan(ours.step(None), ours.tokens)
    limits = {f"{share:.0%}": int(share * plan.unlimited_bytes) for share in SHARES}
    wanted = {what: limit for what, limit in limits.items() if what == "100%" or not only or what in only}
    wanted = {what: limit for what, limit in wanted.items() if plan.fits(limit - SLACK)}
    if not only or SMALLEST in only:
        print(plan, flush=True)
        wanted[SMALLEST] = plan.smallest_bytes + SLACK
    return wanted


def lines(name: str, device: ps.Device, compiles: bool, alone: bool, only: list[str], report: Report) -> None:
    sizes = MODELS[name]
    tokens = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
    limits = limits_of(sizes, tokens, device, only)
    if len(limits) > 1:
        bits = {digest(sizes, tokens, device, limit) for limit in limits.values()}
        report.add(f"{name}: different results", len(bits), "", "= 1", len(bits) == 1, "loss and parameters")
    ours = Budgets(sizes, tokens, device)
    sides: Sides = {what: ours.side(limit) for what, limit in limits.items()}
    taken = {what: ours.physical_bytes(run) for what, run in sides.items()}
    best = best_of(sides, rounds=5)
    for what, limit in limits.items():
        is_within = taken[what] <= limit
        detail = f"{best[what] / STEPS * 1e3:.2f} ms; {taken[what] / MIB:.1f} of {limit / MIB:.1f} MiB taken"
        report.add(f"{name}: time at {what}", best[what] / best["100%"], "x", "in budget", is_within, detail)
    cuda = device.name.startswith("cuda")
    for what, make in ({} if alone else peers(sizes, tokens, cuda, compiles)).items():
        if only and what not in only:
            continue
        own, theirs, nbytes = beside(sides["100%"], make)
        memory = f"; {nbytes / MIB:.1f} MiB" if nbytes else ""
        detail = f"{theirs / STEPS * 1e3:.2f} ms{memory}; ours {own / STEPS * 1e3:.2f} ms"
        report.add(f"{name}: {what} over ours at 100%", theirs / own, "x", "", None, detail)


def planned(name: str, batch: int, device: ps.Device) -> tuple[Budgets, MemoryPlan]:
    """A model with a plan for its step, which counts what is there beside the model."""
    gc.collect()
    device.cleanup()
    base = MODELS[name]
    ours = Budgets(base, np.zeros((batch, base.context + 1), np.int64), device)
    return ours, ps.memory.plan(ours.step(None), ours.tokens)


def largest_batch(name: str, device: ps.Device, limit: int) -> int:
    """The largest batch that trains inside a budget, by multiples of a quarter of the model's own."""
    unit = max(1, MODELS[name].batch // 4)

    def fits(count: int) -> bool:
        return planned(name, count * unit, device)[1].fits(limit - SLACK)

    few, many = 0, 4
    while fits(many):
        few, many = many, 4 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few * unit


def foretold(name: str, batch: int, device: ps.Device, limit: int) -> str:
    """What a plan says of a batch inside a budget."""
    _ours, plan = planned(name, batch, device)
    inside = plan.within(limit)
    return f"{inside.verdict(limit)}; {inside.budgets[-1].host_bytes / MIB:,.0f} MiB at the host"


def speed(name: str, batch: int, device: ps.Device, limit: int) -> tuple[float, int]:
    """Tokens a second inside a budget, and the bytes taken. A step may take seconds, so few are run."""
    gc.collect()
    device.cleanup()
    base = MODELS[name]
    tokens = np.random.default_rng(0).integers(0, base.vocab, (1, base.context + 1))
    run = (ours := Budgets(base, np.repeat(tokens, batch, 0), device)).side(limit, steps=1)
    taken = ours.physical_bytes(run)
    return batch * base.context / best_of({"ours": run}, rounds=2)["ours"], taken


def within(name: str, device: ps.Device, limits: list[str], batches: list[int], report: Report) -> None:
    for text in limits:
        limit = parse_bytes(text)
        largest = [] if batches else [largest_batch(name, device, limit)]
        # The largest, and one that leaves room: less is computed again.
        for batch in filter(None, batches or [*largest, *(2 * batch // 3 for batch in largest)]):
            if device.driver.rates is not None:  # it is only described
                detail = foretold(name, batch, device, limit - SLACK)
                report.add(f"{name}: batch inside {text}", batch, "", "", None, detail)
                continue
            # State that the plan does not count, such as the last losses, may take what is left.
            try:
                rate, taken = speed(name, batch, device, limit)
            except OutOfDeviceMemory as error:
                report.add(f"{name}: batch {batch} inside {text}", 0, "", "", None, str(error)[:60])
                continue
            detail = f"{rate:,.0f} tokens/s; {taken / MIB:.1f} MiB taken"
            report.add(f"{name}: batch inside {text}", batch, "", "in budget", taken <= limit, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--model", choices=MODELS, help="gpt2-124M on CUDA, else nano, if nothing is said")
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU, too")
    parser.add_argument("--alone", action="store_true", help="without PyTorch and JAX")
    parser.add_argument("--only", nargs="+", default=[], help="of budgets and peers, by their names")
    parser.add_argument("--within", nargs="+", default=[], help="budgets, each with as large a batch as fits")
    parser.add_argument("--batch", nargs="+", type=int, default=[], help="the batches inside, where known")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    cuda = device.name.startswith("cuda")

    def save() -> None:
        """After each line, as the last of them may take minutes."""
        if options.save:
            libraries = {"torch": torch, "jax": jax_gpt.jax}
            versions = {
                name: "none" if each is None else each.__version__ for name, each in libraries.items()
            }
            report.save(options.save, "budget", device, versions)

    report = Report(save)
    name = options.model or ("gpt2-124M" if cuda else "nano")
    if options.within:
        within(name, device, options.within, options.batch, report)
    else:
        lines(name, device, options.compile or cuda, options.alone, options.only, report)


if __name__ == "__main__":
    main()
