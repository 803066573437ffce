"""Training runs: configuration, the loop, checkpoints, metrics, what is shown, and the report."""

from penstock.train.checkpoint import Checkpoint, load, load_last
from penstock.train.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from penstock.train.loading import load_model
from penstock.train.metrics import Metrics
from penstock.train.report import report_on
from penstock.train.trainer import Trainer, TrainingError
from penstock.train.view import open_view

__all__ = [
    "Checkpoint",
    "Config",
    "DataConfig",
    "Metrics",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "Trainer",
    "TrainingError",
    "load",
    "load_last",
    "load_model",
    "open_view",
    "report_on",
]
