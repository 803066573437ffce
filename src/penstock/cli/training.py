"""`penstock train`: a run of training, new or resumed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import penstock
from penstock.cli.generating import stream
from penstock.cli.launching import start_ranks
from penstock.cli.settings import Changes, with_settings
from penstock.errors import OutOfDeviceMemory, PenstockError, SettingError
from penstock.terminal import complain, say

if TYPE_CHECKING:
    from penstock.train import Checkpoint, Config

RUNS = Path("runs")  # where runs get their folders
_SAMPLE = 200  # tokens that end a run
_SHARDS = 8  # of a batch on several devices


@with_settings()
def train(
    changes: Changes,
    run: Annotated[Path | None, typer.Argument(help="With --resume: the folder of the run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume RUN, or the last run.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder of a new run.", metavar="FOLDER")] = None,
    devices: Annotated[
        int, typer.Option(help="Ranks to start with mpiexec, each with a device.", metavar="N", min=1)
    ] = 1,
) -> None:
    """Train a language model on text, or resume a run.

    By default, a small GPT learns from the sources of Python. --model trains a named size from scratch
    (`penstock config` lists them), or fine-tunes the model of a folder, a GGUF file or a run: all of it, or
    with --lora adapters of it. Options take precedence over --set, --set over
    the file, and the file over the settings of a resumed run. The run's folder gets its configuration,
    metrics, checkpoints and a report. Ctrl-C and SIGTERM save and end, with exit status 130 or 143. Several
    devices, by --devices or `mpiexec -n N penstock train`, share each batch; any number of them may resume.
    """
    if run is not None and not resume:
        raise SettingError(f"to go on with {run} say --resume {run}; for a new run there say --out {run}")
    if resume and out is not None:
        raise SettingError("a resumed run stays in its folder: --resume and --out do not go together")
    from penstock.train import Config
    from penstock.train.checkpoint import checkpoint_files

    if devices > 1:
        raise typer.Exit(start_ranks(devices))
    checkpoint: Checkpoint | None = None
    if resume:
        folder = run if run is not None else _last_run()
        settings, checkpoint = _resumed(folder)
    else:
        folder = out if out is not None else RUNS / time.strftime("%Y-%m-%d-%H%M%S")
        if out is not None and checkpoint_files(folder):
            raise SettingError(f"{folder} holds a run already; --resume {folder} goes on with it")
        settings = Config()
    settings = changes.applied(settings)
    if settings.run.device:
        penstock.use(settings.run.device)
    penstock.distributed.init()
    settings = _divided(settings)
    _run(settings, folder, checkpoint, numbered=not resume and out is None)


def _divided(settings: Config) -> Config:
    """Settings with shards of a batch, where there are several ranks."""
    count = penstock.distributed.size()
    if count == 1 or settings.ranks.shards:
        return settings
    shards = max(count, min(_SHARDS, 1 << (settings.data.batch.bit_length() - 1)))
    return settings.changed({"ranks": {"shards": shards}})


def _resumed(folder: Path) -> tuple[Config, Checkpoint | None]:
    """The settings of a run, and its last valid checkpoint; None if it ended before the first."""
    from penstock.train import Config, load_last
    from penstock.train.checkpoint import checkpoint_files, text_config
    from penstock.train.report import CONFIG_FILE

    if not checkpoint_files(folder) and (folder / CONFIG_FILE).is_file():
        complain(f"{folder} has no checkpoint yet; the run starts from its first step")
        return Config().with_file(folder / CONFIG_FILE), None
    checkpoint, problems = load_last(folder)
    for problem in problems:
        complain(problem)
    return text_config(checkpoint, folder), checkpoint


def _run(settings: Config, folder: Path, checkpoint: Checkpoint | None, numbered: bool) -> None:
    from penstock.train import NoView, TextTrainer, open_view
    from penstock.train.loading import stream_text

    console = Console()
    view = open_view(console) if penstock.distributed.rank() == 0 else NoView()
    if settings.run.memory and penstock.distributed.size() == 1:  # ranks first divide the model
        penstock.default_device().limit_bytes = settings.run.memory
    try:
        trainer = TextTrainer(settings, folder, view, checkpoint, numbered)
        folder = trainer.folder
        trainer.fit()
        if trainer.stopped_by is not None:
            how = f"; to go on: penstock train --resume {folder}" if folder.is_dir() else ""
            view.note(f"stopped at step {trainer.step}{how}")
            raise typer.Exit(128 + trainer.stopped_by)
        with trainer.whole():
            if penstock.distributed.rank() > 0:
                return
            prompt = trainer.prompt()
            text = trainer.tokenizer.decode(prompt)
            view.note("\na sample:")
            say(console, text, style="dim", end="")
            seed = settings.run.seed
            pieces = stream_text(trainer.model, trainer.tokenizer, prompt, _SAMPLE, 0.8, top_k=40, seed=seed)
            text += stream(pieces)
        reported = trainer.report(text)
    except OutOfDeviceMemory as error:
        raise PenstockError(
            f"{error}\nA smaller batch under [data] needs less (accumulate under [optimizer] makes up), and "
            "so does a smaller context or width under [model]. --memory sets the limit."
        ) from None
    report = f"report: {folder / 'report.html'}; " if reported else ""
    view.note(f"\n{report}more text: penstock generate {folder} --prompt TEXT")


def _last_run() -> Path:
    """The run that was active last."""
    files = [*RUNS.glob("*/metrics.jsonl"), *RUNS.glob("*/config.toml")]
    if not files:
        raise SettingError(f"there is no run in {RUNS}/; name the folder: --resume FOLDER")
    return max(files, key=lambda path: path.lstat().st_mtime).parent
