"""Training steps inside memory budgets, beside PyTorch and JAX: plain, and with a checkpoint per block.

    python benchmarks/budget.py [--device opencl:0] [--model nano] [--compile] [--alone] [--save FILE]
    python benchmarks/budget.py --within 8GiB 24GiB     # the largest batch inside, and its speed

The budgets are shares of what the step takes without a budget, and the smallest that would do, in turn. Each
peer trains the same model in turn with the step without a budget, one peer after the other, as all of them
would not fit; all is in one process, and a ratio of time is that to the step without a budget. Memory is what
the driver has given out; PyTorch's is what its allocator has reserved, on CUDA only; JAX's what XLA plans. On
CUDA, or with --compile, PyTorch is also compiled with `activation_memory_budget`, its own knob for the bytes
that are saved for the gradient.
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

MODELS = {
    "nano": Gpt(2048, 128, 128, 4, 4, 16),
    "gpt2-124M": Gpt(50304, 1024, 768, 12, 12, 16),
    "gpt-1.5B": Gpt(50304, 1024, 1600, 48, 25, 4),
}
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25)
KNOBS = (0.5, 0.2, 0.0)  # of PyTorch
RATE = 3e-4
STEPS = 3  # of each side in a round
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

    def side(self, memory: int) -> Callable[[], None]:
        step = self.step(memory)

        def run() -> None:
            for _ in range(STEPS):
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
    return best["ours"], best["peer"], nbytes


def lines(name: str, device: ps.Device, compiles: bool, alone: bool, report: Report) -> None:
    sizes = MODELS[name]
    tokens = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.batch, sizes.context + 1))
    ours = Budgets(sizes, tokens, device)
    plan = ps.memory.plan(ours.step(None), ours.tokens)
    print(plan, flush=True)
    unlimited, smallest = plan.unlimited_bytes, plan.smallest_bytes + SLACK
    limits = {f"{share:.0%}": int(share * unlimited) for share in SHARES}
    limits = {what: limit for what, limit in limits.items() if limit > smallest} | {"the smallest": smallest}
    del ours  # frees its memory for the next models
    bits = {digest(sizes, tokens, device, limit) for limit in limits.values()}
    ours = Budgets(sizes, tokens, device)
    report.add(f"{name}: different results", len(bits), "", "= 1", len(bits) == 1, "loss and parameters")
    sides: Sides = {what: ours.side(limit) for what, limit in limits.items()}
    taken = {what: ours.physical_bytes(run) for what, run in sides.items()}
    best = best_of(sides, rounds=5)
    for what, limit in limits.items():
        is_within = taken[what] <= limit
        detail = f"{best[what] / STEPS * 1e3:.2f} ms; {taken[what] / MIB:.1f} of {limit / MIB:.1f} MiB taken"
        report.add(f"{name}: time at {what}", best[what] / best["100%"], "x", "in budget", is_within, detail)
    cuda = device.name.startswith("cuda")
    for what, make in ({} if alone else peers(sizes, tokens, cuda, compiles)).items():
        own, theirs, nbytes = beside(sides["100%"], make)
        memory = f"; {nbytes / MIB:.1f} MiB" if nbytes else ""
        detail = f"{theirs / STEPS * 1e3:.2f} ms{memory}; ours {own / STEPS * 1e3:.2f} ms"
        report.add(f"{name}: {what} over ours at 100%", theirs / own, "x", "", None, detail)


def within(name: str, device: ps.Device, limits: list[str], report: Report) -> None:
    """The largest batches, by multiples of a quarter of the model's own, that train inside budgets."""
    base, unit = MODELS[name], max(1, MODELS[name].batch // 4)
    tokens = np.random.default_rng(0).integers(0, base.vocab, (1, base.context + 1))

    def fits(count: int, limit: int) -> bool:
        ours = Budgets(base, np.repeat(tokens, count * unit, 0), device)
        return bool(ps.memory.plan(ours.step(None), ours.tokens).least_bytes <= limit - SLACK)

    def measured(batch: int, limit: int) -> tuple[float, int]:
        """Tokens a second inside a budget, and the bytes taken."""
        gc.collect()
        device.cleanup()
        ours = Budgets(base, np.repeat(tokens, batch, 0), device)
        run = ours.side(limit)
        taken = ours.physical_bytes(run)
        seconds = best_of({"ours": run}, rounds=5)["ours"] / STEPS
        return batch * base.context / seconds, taken

    for text in limits:
        limit, few, many = parse_bytes(text), 0, 1
        while fits(many, limit):
            few, many = many, 2 * many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if fits(middle, limit) else (few, middle)
        # The largest, and one that leaves room: less is computed again. State that the plan does not count,
        # such as the last losses, may take what is left of the budget.
        for batch in sorted({few * unit, (few - 1) * unit, few * unit * 2 // 3}, reverse=True):
            if batch <= 0:
                continue
            try:
                rate, taken = measured(batch, limit)
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
    parser.add_argument("--within", nargs="+", default=[], help="budgets, each with as large a batch as fits")
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    device = ps.use(options.device)
    cuda = device.name.startswith("cuda")
    report = Report()
    name = options.model or ("gpt2-124M" if cuda else "nano")
    if options.within:
        within(name, device, options.within, report)
    else:
        lines(name, device, options.compile or cuda, options.alone, report)
    if options.save:
        libraries = {"torch": torch, "jax": jax_gpt.jax}
        versions = {name: "none" if each is None else each.__version__ for name, each in libraries.items()}
        report.save(options.save, "budget", device, versions)


if __name__ == "__main__":
    main()
