"""The command line: `penstock`.

Each command imports what it needs when it runs, so that the others, and `--help`, start quickly.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

import penstock
from penstock.errors import OutOfDeviceMemory, PenstockError, PenstockWarning, SettingError
from penstock.formatting import format_bandwidth, format_bytes, format_flops, format_seconds
from penstock.printable import printable
from penstock.terminal import cell, say, table

if TYPE_CHECKING:
    from penstock.train import Checkpoint, Config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RUNS = Path("runs")  # where runs get their folders
_SAMPLE = 200  # tokens that end a run


@app.callback()
def penstock_command() -> None:
    """Train and run neural networks on any GPU, inside a memory budget that you set."""


@app.command("devices")
def list_devices(
    name: Annotated[str | None, typer.Argument(help="Only this one, or the first of a driver's.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compute a few of everything, and compare it with NumPy.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Forget what was measured on this machine, and measure it again."),
    ] = False,
) -> None:
    """List the devices of this machine, the best first; or check or measure them.

    What a device reaches, where `auto` runs what, and which kernels of a library are used is measured once
    and kept. With --measure it is all forgotten; the rates are measured now, the rest when it is needed.
    """
    if check and measure:
        raise SettingError("--check and --measure are two orders; give one at a time")
    default = penstock.default_device()
    chosen = [penstock.registry.find(name)] if name else penstock.devices()
    console = Console()
    if check:
        wrong = [device.name for device in chosen if not _check(device, console)]
        if wrong:
            raise PenstockError(f"{' and '.join(wrong)} did not compute what NumPy computes")
        return
    if measure:
        _measure(chosen, console)
        return
    rows = table(("name", "device", "kind", "memory", "units", "interface"))
    for device in chosen:
        can = device.capabilities
        memory = format_bytes(can.total_bytes) + (" shared" if can.shared_memory else "")
        mark = " *" if device is default or device in default.members else ""
        cells = (device.name + mark, can.description, can.kind, memory, str(can.compute_units), can.api)
        rows.add_row(*map(cell, cells))
    console.print(rows)
    marked = "the default" if default.dispatcher is None else "the default, auto, chooses among these"
    console.print(f"* {marked}; set PENSTOCK_DEVICE to another name to change it", style="dim")


def _measure(devices: Sequence[penstock.Device], console: Console) -> None:
    """Measure devices again, and print what they reach."""
    from penstock.measuring.ceilings import Ceilings
    from penstock.measuring.quiet import Watch
    from penstock.measuring.rates import machine_rates
    from penstock.tuning_cache import forget_everything

    forget_everything()
    watch = Watch()
    rates = machine_rates(devices, again=True)
    for device in devices:
        ceilings = Ceilings(device)
        moved, computed = ceilings.bandwidth(), ceilings.operations("float32")
        if device not in rates or moved is None or computed is None:
            say(console, f"{device.name}: it could not be measured")
            continue
        reached = f"{format_bandwidth(moved)}, {format_flops(computed)} in float32"
        small = format_seconds(rates[device].program)
        say(console, f"{device.name}: {reached}, {small} for a small program")
    if watch.busy():
        say(console, "the machine was busy: what is measured again when it is not may be more", style="dim")


def _check(device: penstock.Device, console: Console) -> bool:
    """Print what each check of a device finds; whether all is right."""
    from penstock.checking import check

    can = device.capabilities
    about = f"{device.name}: {can.description}, {can.api}"
    say(console, about)
    right = True
    for finding in check(device):
        verdict = f"WRONG: {finding.problem}" if finding.problem else f"right, {finding.seconds:.1f} s"
        style = "red" if finding.problem else "green"
        line = f"  {finding.what:<20} {verdict}"
        say(console, line, style)
        right = right and not finding.problem
    verdict = "it computes what NumPy computes" if right else "do not use it: please report the lines above"
    say(console, f"  {'verdict':<20} {verdict}\n")
    return right


@app.command("train")
def train(
    run: Annotated[Path | None, typer.Argument(help="With --resume: the folder of the run.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A file or folder of text; else the sources of this Python.", metavar="PATH"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings in TOML; the config.toml of any run shows all of them.", metavar="FILE"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps the run has in all.")] = None,
    memory: Annotated[str | None, typer.Option(help="The most to take from it, such as 2GiB.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same losses.")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between two checkpoints; 0: one after each evaluation.", metavar="STEPS"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with RUN, or with the last one.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder of a new run.", metavar="FOLDER")] = None,
) -> None:
    """Train a GPT on text, a small one on the sources of Python if nothing else is said.

    Options win over the file, and the file over what a resumed run had. The run's folder gets its
    configuration, metrics, checkpoints and a report. Ctrl-C and SIGTERM save and end, with exit status 130
    or 143.
    """
    if run is not None and not resume:
        raise SettingError(f"to go on with {run} say --resume {run}; for a new run there say --out {run}")
    if resume and out is not None:
        raise SettingError("a resumed run stays in its folder: --resume and --out do not go together")
    options: dict[str, dict[str, Any]] = {
        "data": {"path": data if data is None else str(Path(data).absolute())},
        "run": {"device": device, "steps": steps, "memory": memory, "seed": seed}
        | {"checkpoint_every": checkpoint_every},
    }
    from penstock.train import Config

    checkpoint: Checkpoint | None = None
    if resume:
        folder = run if run is not None else _last_run()
        settings, checkpoint = _resumed(folder)
    else:
        folder = out if out is not None else RUNS / time.strftime("%Y-%m-%d-%H%M%S")
        if out is not None and any(folder.glob("checkpoints/*.safetensors")):
            raise SettingError(f"{folder} holds a run already; --resume {folder} goes on with it")
        settings = Config()
    if config is not None:
        settings = settings.with_file(config)
    settings = settings.changed(
        {
            name: {key: value for key, value in values.items() if value is not None}
            for name, values in options.items()
        }
    )
    _run(settings, folder, checkpoint, numbered=not resume and out is None)


def _resumed(folder: Path) -> tuple[Config, Checkpoint | None]:
    """The settings of a run, and its last sound checkpoint; none where it was ended before the first one."""
    from penstock.train import Config, load_last
    from penstock.train.checkpoint import found
    from penstock.train.report import CONFIG_FILE

    if not found(folder) and (folder / CONFIG_FILE).is_file():
        _complain(f"{folder} has no checkpoint yet; the run starts again from its beginning")
        return Config().with_file(folder / CONFIG_FILE), None
    checkpoint, problems = load_last(folder)
    for problem in problems:
        _complain(problem)
    return checkpoint.config, checkpoint


def _run(settings: Config, folder: Path, checkpoint: Checkpoint | None, numbered: bool) -> None:
    from penstock.train import Trainer, open_view
    from penstock.train.loading import stream_text

    console = Console()
    view = open_view(console)
    _use(settings.run.device)
    if settings.run.memory:
        penstock.default_device().limit_bytes = settings.run.memory
    try:
        trainer = Trainer(settings, folder, view, checkpoint, numbered)
        folder = trainer.folder
        if trainer.step >= settings.run.steps:
            view.note(f"all {settings.run.steps} steps are done; --steps with a larger number goes on")
        trainer.train()
        if trainer.stopped_by is not None:
            how = f"; to go on: penstock train --resume {folder}" if folder.is_dir() else ""
            view.note(f"stopped at step {trainer.step}{how}")
            raise typer.Exit(128 + trainer.stopped_by)
        prompt = trainer.prompt()
        text = trainer.tokenizer.decode(prompt)
        view.note("\na sample:")
        say(console, text, style="dim", end="")
        seed = settings.run.seed
        pieces = stream_text(trainer.model, trainer.tokenizer, prompt, _SAMPLE, 0.8, top_k=40, seed=seed)
        text += _streamed(pieces)
        reported = trainer.report(text)
    except OutOfDeviceMemory as error:
        raise PenstockError(
            f"{error}\nA smaller batch under [data] needs less (accumulate under [optimizer] makes up), and "
            "so does a smaller context or width under [model]. --memory sets the limit."
        ) from None
    report = f"report: {folder / 'report.html'}; " if reported else ""
    view.note(f"\n{report}more text: penstock generate {folder} --prompt TEXT")


@app.command("generate")
def generate(
    model: Annotated[Path, typer.Argument(help="The folder of a run, or of a GPT-2 as Hugging Face has it.")],
    prompt: Annotated[str, typer.Option(help="What to go on from; ids where there is no tokenizer.")] = "",
    tokens: Annotated[int, typer.Option(help="How many to generate.", min=0)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest each time.", min=0.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the likeliest so many.", min=1)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest with this chance in all.", min=0.0, max=1.0)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", min=0)] = None,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
) -> None:
    """Generate text with a trained model, shown as it comes."""
    from penstock.train.loading import load_model, stream_text

    _use(device)
    network, tokenizer = load_model(model)
    if tokenizer is None:
        try:
            ids: Any = [int(part) for part in prompt.split()] or [0]
        except ValueError:
            raise SettingError(
                f"{model} has no tokenizer.json, so a prompt is ids such as '17 4', and {prompt!r} was given"
            ) from None
    else:
        ids = tokenizer.encode(prompt or "\n")
    try:
        pieces = stream_text(network, tokenizer, ids, tokens, temperature, top_k, top_p, seed)
        _streamed([prompt] if tokenizer else [], pieces)
    except ValueError as error:  # ids that the model does not have, and the like
        raise SettingError(str(error)) from None


@app.command("report")
def report(
    source: Annotated[
        Path,
        typer.Argument(help="The folder of a run, or a trace that ps.profile wrote.", metavar="RUN"),
    ],
) -> None:
    """Write the page of a run again, from what its folder holds; or one about a trace, beside it."""
    from penstock.train import report_on

    say(Console(), f"report: {report_on(source)}")


@app.command("bench")
def bench(
    device: Annotated[
        list[str] | None,
        typer.Option(help="A name from `penstock devices`; may be given several times.", metavar="NAME"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A case by its name; may be given several times.", metavar="NAME")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep what is measured.", metavar="FILE")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Measure what FILE has, and fail if something got slower.", metavar="FILE"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Run the same in PyTorch, in turn: torch.", metavar="LIBRARY")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, wider intervals.")] = False,
) -> None:
    """Measure operations and whole training steps, with their share of what the device can reach.

    Times are medians with 95% confidence intervals. With --compare, the exit status is 1 when a case got
    slower by more than noise and 5%.
    """
    from penstock.bench import bench as measure

    if not measure(device or (), only or (), save, compare, against, quick):
        raise typer.Exit(1)


@app.command("advise", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def advise(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A trace that ps.profile saved; or what to run: a script, or -m MODULE, with its arguments.",
            metavar="TRACE|COMMAND...",
        ),
    ],
) -> None:
    """Say what would make a program faster or smaller: each flaw with its evidence, its line and the gain.

    A command runs in this process, under a profile: script.py --lr 1, or -- python -m package.
    """
    from penstock.advising.running import profiled
    from penstock.advising.text import rendered

    status = 0
    if len(source) == 1 and source[0].endswith(".json"):
        found = penstock.advise(source[0])
    else:
        profile, status = profiled(source)
        found = penstock.advise(profile)
    say(Console(), rendered(found))
    if status:
        raise typer.Exit(status)


def _streamed(*parts: Iterable[str]) -> str:
    """Write text as it comes, until Ctrl-C; all of it. A terminal gets no character that it would obey."""
    written = []
    obeys = sys.stdout.isatty()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        for pieces in parts:
            for piece in pieces:
                written.append(piece)
                sys.stdout.write(printable(piece) if obeys else piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    sys.stdout.write("\n")
    return "".join(written)


def _use(device: str | None) -> None:
    if device:
        penstock.use(device)


def _last_run() -> Path:
    """The run that went on last."""
    found = [*RUNS.glob("*/metrics.jsonl"), *RUNS.glob("*/config.toml")]
    if not found:
        raise SettingError(f"there is no run in {RUNS}/; name the folder: --resume FOLDER")
    return max(found, key=lambda path: path.lstat().st_mtime).parent


def _complain(problem: object) -> None:
    say(Console(stderr=True), f"penstock: {problem}", style="red")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of Penstock in a line, without its source; see `warnings.showwarning`."""
    if issubclass(category, PenstockWarning):
        say(Console(stderr=True), f"penstock: {message}", style="yellow")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def main() -> None:
    """Run the command line; Penstock's own errors become one line and exit status 1."""
    warnings.showwarning = _show_warning
    try:
        app()
    except PenstockError as error:
        _complain(error)
        raise SystemExit(1) from None
    except MemoryError:
        _complain("this machine has not enough memory for that")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
