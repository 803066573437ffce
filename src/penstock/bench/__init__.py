"""Benchmarks for users: operations and whole steps, with their share of the device's best rates."""

from penstock.bench.case import Case
from penstock.bench.ceilings import Ceilings, measure_ceilings
from penstock.bench.comparing import Change, Comparison, compare
from penstock.bench.errors import BenchmarkError
from penstock.bench.results import DeviceResults, Hardware, Measured, Results, load, versions
from penstock.bench.running import bench, cases_for, run
from penstock.bench.sampling import FULL, QUICK, Effort
from penstock.bench.statistics import Interval, median_interval, ratio_in_turn, ratio_of_runs, verdict

__all__ = [
    "FULL",
    "QUICK",
    "BenchmarkError",
    "Case",
    "Ceilings",
    "Change",
    "Comparison",
    "DeviceResults",
    "Effort",
    "Hardware",
    "Interval",
    "Measured",
    "Results",
    "bench",
    "cases_for",
    "compare",
    "load",
    "measure_ceilings",
    "median_interval",
    "ratio_in_turn",
    "ratio_of_runs",
    "run",
    "verdict",
    "versions",
]
