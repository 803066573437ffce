"""The page of a run, during it and later: `report.html` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.data.files import written_whole
from penstock.errors import ReportError
from penstock.files import read_bytes
from penstock.report import Findings, Run, findings, of_trace, render
from penstock.train import metrics
from penstock.train.config import Config
from penstock.train.metrics import Curve
from penstock.train.settings import RunSettings, from_file

FILE = "report.html"
CONFIG_FILE = "config.toml"
SAMPLE_FILE = "sample.txt"
_MOST_SAMPLE = 16 << 20  # bytes


def write_report(
    run: Path,
    config: Config | RunSettings,
    curves: Mapping[str, Curve],
    findings: Findings | None,
    sample: str,
) -> Path:
    """Write the page of a run into its folder."""
    points = {name: curve.shown() for name, curve in curves.items()}
    done = int(points["step"][-1][1]) if "step" in points else 0
    steps = config.run.steps if isinstance(config, Config) else config.steps or done
    own = [name for name in points if name not in metrics.NAMES and not metrics.is_of_ranks(name)]
    page = render(run.resolve().name, Run(steps, points, config.tree(), sample, own), findings)
    return _written(run / FILE, page)


def report_on(path: Path) -> Path:
    """Write the page of a run from the contents of its folder, or that of a trace beside it; its path.

    A ReportError says what is missing or damaged.
    """
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        raise ReportError(f"there is no {path}; give the folder of a run, or a trace that ps.profile wrote")
    return _written(path.with_suffix(".html"), render(path.name, None, of_trace(path)))


def _of_run(run: Path) -> Path:
    if not (run / CONFIG_FILE).is_file() or not (run / metrics.FILE).is_file():
        raise ReportError(
            f"{run} holds no run: it has no {CONFIG_FILE} or no {metrics.FILE}, which `penstock train` writes"
        )
    for name in (CONFIG_FILE, metrics.FILE, findings.FILE):
        _check_inside(run, name)
    config = from_file(run / CONFIG_FILE)
    return write_report(run, config, metrics.read_curves(run), read_findings(run), read_sample(run))


def read_findings(run: Path) -> Findings | None:
    """The findings of the run's own profile; None if the run has none."""
    path = run / findings.FILE
    return findings.load(path) if path.exists() else None


def read_sample(run: Path) -> str:
    """The sample of text from the end of the run; empty if it is no regular file of the run."""
    try:
        return read_bytes(run / SAMPLE_FILE, _MOST_SAMPLE, follow=False).decode(errors="replace")
    except OSError:
        return ""


def write_sample(run: Path, sample: str) -> None:
    """Keep a text for the page."""
    with written_whole(run / SAMPLE_FILE) as file:
        file.write(sample.encode(errors="replace"))


def _check_inside(run: Path, name: str) -> None:
    """Check that a file is no symbolic link, since the content of its target would be part of the page."""
    if not (run / name).resolve().is_relative_to(run.resolve()):
        raise ReportError(f"{run / name} is a link to {(run / name).resolve()}, outside of the run's folder")


def _written(path: Path, page: str) -> Path:
    with written_whole(path) as file:
        file.write(page.encode(errors="replace"))
    return path
