"""`report.html`: one page about a run or a profile that needs nothing but itself."""

from penstock.report.findings import Certificate, Findings, of_profile, of_trace
from penstock.report.page import Run, render
from penstock.report.planned_step import PlannedStep

__all__ = ["Certificate", "Findings", "PlannedStep", "Run", "of_profile", "of_trace", "render"]
