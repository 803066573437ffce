"""The models of the examples beside their PyTorch twins: whole training steps, all sides in turn.

    python benchmarks/zoo.py [NAME ...] [--device opencl:0] [--no-compile] [--cpu-time] [--rounds 7]
        [--save FILE]

A twin is the example's own file, with PyTorch in the place of Penstock: the names are the same. Both sides
have the same sizes, batches and optimizer. PyTorch runs with as many threads as there are cores, eager and
compiled (`torch.compile`), and the faster of the two counts; a line says which. On CUDA, both sides multiply
float32 on tensor cores (TF32), as PyTorch does in convolutions unless it is told otherwise. A ratio of time
is PyTorch's over Penstock's, of memory Penstock's planned peak over PyTorch's measured peak, on CUDA only.
That peak has both sides of PyTorch in it: parameters, gradients and moments of the eager model, too.

With `--cpu-time`, CPU seconds of all threads are compared instead of time, for machines that others use, too.
PyTorch then has one thread, because several spin while they wait.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

import penstock as ps
from measuring import Report, best_of, installed
from penstock.bench.steps import Gpt, torch_gpt

torch = installed("torch")
Batch = tuple[Any, ...]
FOLDERS = [Path(__file__).parent.parent / "examples", Path(__file__).parent]
MIB = 1 << 20
GPT = Gpt(vocab=2048, context=128, width=128, layers=4, heads=4, batch=8)


@dataclass(frozen=True)
class Case:
    """A model of a file, its batches, and its loss."""

    file: str
    build: Callable[[Any], Any]  # of the file's names, the model
    batch: Callable[[np.random.Generator, int], Batch]
    loss: Callable[[Any, Any, Batch], Any]  # of the functional module, the model and a batch
    samples: tuple[int, int]  # in a batch, on a CPU and on a GPU
    half: bool = False  # in bfloat16, on CUDA only


def pictures(channels: int, size: int, classes: int) -> Callable[[np.random.Generator, int], Batch]:
    def draw(random: np.random.Generator, count: int) -> Batch:
        images = random.standard_normal((count, channels, size, size), np.float32)
        return images, random.integers(0, classes, count)

    return draw


def letters(vocab: int, length: int) -> Callable[[np.random.Generator, int], Batch]:
    return lambda random, count: (random.integers(0, vocab, (count, length + 1)),)


def noisy(random: np.random.Generator, count: int) -> Batch:
    images, noise = (random.standard_normal((count, 1, 32, 32), np.float32) for _ in range(2))
    return images, random.integers(1, 41, count), noise


def told_apart(functional: Any, model: Any, batch: Batch) -> Any:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def next_letters(functional: Any, model: Any, batch: Batch) -> Any:
    (ids,) = batch
    logits = model(ids[:, :-1])
    logits = logits[0] if isinstance(logits, tuple) else logits  # an LSTM's state comes along
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def next_tokens(functional: Any, model: Any, batch: Batch) -> Any:
    """The loss of a GPT; Penstock's never has all logits in memory."""
    (ids,) = batch
    if isinstance(model, ps.nn.GPT):
        return model.loss(ids[:, :-1], ids[:, 1:])
    return next_letters(functional, model, batch)


def what_is_noise(functional: Any, model: Any, batch: Batch) -> Any:
    images, times, noise = batch
    return functional.mse_loss(model(images, times), noise)


def frozen(net: Any) -> Any:
    net.conv1.requires_grad_(False)
    net.conv2.requires_grad_(False)
    return net


def gpt(names: Any) -> Any:
    if names.nn is ps.nn:
        return ps.nn.GPT(GPT.vocab, GPT.context, GPT.width, GPT.layers, GPT.heads)
    return torch_gpt(torch, GPT)


CASES = {
    "digits": Case("digits", lambda names: names.Net(32), pictures(1, 8, 10), told_apart, (128, 2048)),
    "fine-tuning": Case(
        "digits", lambda names: frozen(names.Net(32)), pictures(1, 8, 10), told_apart, (128, 2048)
    ),
    "resnet": Case("resnet", lambda names: names.resnet(32), pictures(1, 32, 4), told_apart, (16, 512)),
    "lstm": Case("lstm", lambda names: names.Writer(64, 256, 2), letters(64, 48), next_letters, (16, 256)),
    "vit": Case("vit", lambda names: names.ViT(32, 4, 128, 4), pictures(1, 32, 10), told_apart, (16, 512)),
    "diffusion": Case("diffusion", lambda names: names.UNet(32), noisy, what_is_noise, (8, 256)),
    "gpt": Case("gpt", gpt, letters(GPT.vocab, GPT.context), next_tokens, (GPT.batch, 256)),
    "resnet50": Case(
        "resnet50", lambda names: names.resnet50(), pictures(3, 224, 1000), told_apart, (0, 256), half=True
    ),
}


def loaded(file: str, library: ModuleType) -> Any:
    """The names of a file, with a library as what it imports as `penstock`."""
    path = next(folder / f"{file}.py" for folder in FOLDERS if (folder / f"{file}.py").exists())
    spec = importlib.util.spec_from_file_location(f"{library.__name__}_{file}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_in = ModuleType("penstock")
    stand_in.__dict__.update(library.__dict__)
    stand_in.__dict__.setdefault("Device", object)
    replaced = {"penstock": stand_in, "penstock.nn": library.nn}
    with (
        mock.patch.dict(sys.modules, replaced),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        spec.loader.exec_module(module)
    sys.modules[spec.name] = module  # where compilers look for it
    return module


def our_step(case: Case, arrays: Batch, device: ps.Device) -> tuple[Callable[[], object], int]:
    """A step, and the bytes that it takes at most, with parameters and moments."""
    ps.manual_seed(0)
    model = case.build(loaded(case.file, ps)).to(device)
    if case.half:
        model.to(ps.bfloat16)
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(*batch: ps.Tensor) -> ps.Tensor:
        loss: ps.Tensor = case.loss(ps.nn.functional, model, batch)
        loss.backward()
        optimizer.step()
        return loss

    batch = [ps.asarray(array, device=device) for array in arrays]
    if case.half:
        batch[0] = batch[0].to(ps.bfloat16)

    def run() -> None:
        step(*batch)
        device.sync()

    return run, ps.memory.plan(step, *batch).unlimited_bytes


def torch_step(case: Case, arrays: Batch, where: str, compiled: bool) -> Callable[[], object]:
    """The same step of PyTorch, on the CPU or with CUDA; ResNet-50 with channels last, for cuDNN."""
    torch.manual_seed(0)
    model = case.build(loaded(case.file, torch)).to(where)
    batch = [torch.from_numpy(array).to(where) for array in arrays]
    if case.file.startswith("resnet"):
        model = model.to(memory_format=torch.channels_last)
        batch[0] = batch[0].to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def loss_of(*batch: Any) -> Any:
        with torch.autocast(where, dtype=torch.bfloat16, enabled=case.half):
            return case.loss(torch.nn.functional, model, batch)

    if compiled:
        loss_of = torch.compile(loss_of, mode="reduce-overhead" if where == "cuda" else None)

    def run() -> None:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()
        if where == "cuda":
            torch.cuda.synchronize()

    return run


def warm(run: Callable[[], object]) -> None:
    for _ in range(3):
        run()


def peers(case: Case, arrays: Batch, where: str, compiles: bool) -> dict[str, Callable[[], object]]:
    """The sides of PyTorch: compiled, and eager, which may be the faster."""
    sides = {"eager": torch_step(case, arrays, where, compiled=False)}
    warm(sides["eager"])
    if compiles:
        try:
            compiled = torch_step(case, arrays, where, compiled=True)
            warm(compiled)
            sides["compiled"] = compiled
        except Exception as problem:  # of any of the compilers below
            print(f"torch.compile does not work here: {str(problem).splitlines()[0]}")
    return sides


def forget(cuda: bool) -> None:
    """Free what PyTorch has kept of models before."""
    torch._dynamo.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def torch_peak(run: Callable[[], object]) -> int:
    """The peak of PyTorch's allocator, on CUDA."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return int(torch.cuda.max_memory_reserved())


def line(name: str, options: argparse.Namespace, device: ps.Device, report: Report) -> None:
    case, cuda = CASES[name], device.name.startswith("cuda")
    count = case.samples[cuda]
    arrays = case.batch(np.random.default_rng(0), count)
    ours, planned = our_step(case, arrays, device)
    warm(ours)
    sides: dict[str, Callable[[], object]] = {"penstock": ours}
    peak = 0
    if torch is not None:
        forget(cuda)
        held = int(torch.cuda.memory_reserved()) if cuda else 0
        sides |= peers(case, arrays, "cuda" if cuda else "cpu", not options.no_compile)
        peak = torch_peak(sides.get("compiled", sides["eager"])) - held if cuda else 0
    clock = time.process_time if options.cpu_time else time.perf_counter
    best = best_of(sides, rounds=options.rounds, clock=clock)
    times = ", ".join(f"{side} {seconds * 1e3:.2f} ms" for side, seconds in best.items())
    memory = f"{planned / MIB:.0f} MiB planned"
    theirs = {side: seconds for side, seconds in best.items() if side != "penstock"}
    if not theirs:
        report.add(f"{name}: step of {count}", best["penstock"] * 1e3, "ms", "", None, memory)
        return
    peer = min(theirs, key=theirs.__getitem__)
    ratio, goal = best[peer] / best["penstock"], 0.8 if case.half else 1.0
    what = f"{name}: step of {count}, PyTorch {peer}"
    report.add(what, ratio, "x", f">= {goal}", ratio >= goal, f"{times}; {memory}")
    if peak:
        detail = f"{memory}, PyTorch {peak / MIB:.0f} MiB"
        report.add(f"{name}: memory", planned / peak, "x", "<= 1", planned <= peak, detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU seconds of all threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write the table as JSON, with the commit and the device")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    os.environ.setdefault("PENSTOCK_TF32", "1")
    if torch is not None:
        torch.set_float32_matmul_precision("high")
        if options.cpu_time:
            torch.set_num_threads(1)
    device = ps.use(options.device)
    versions = {"numpy": np.__version__, "torch": torch.__version__ if torch else "not installed"}
    print(f"{device.name}: {device.capabilities.description}; {versions}\n")
    report = Report()
    cuda = device.name.startswith("cuda")
    for name, case in CASES.items():
        if name in options.names or (not options.names and (cuda or not case.half)):
            line(name, options, device, report)
    if options.save:
        given = (
            f" --device {device.name}{' --cpu-time' if options.cpu_time else ''} --rounds {options.rounds}"
        )
        report.save(options.save, "zoo", device, versions, given)


if __name__ == "__main__":
    main()
