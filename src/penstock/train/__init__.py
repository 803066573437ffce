"""Training runs: the trainer, its configuration for text, checkpoints, metrics, what is shown, the report."""

from penstock.train.callbacks import Callback, EarlyStopping
from penstock.train.checkpoint import Checkpoint, load, load_last
from penstock.train.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from penstock.train.loading import load_model
from penstock.train.metrics import Metrics
from penstock.train.report import report_on
from penstock.train.run import TrainingError
from penstock.train.text_trainer import TextTrainer
from penstock.train.trainer import Trainer
from penstock.train.view import NoView, View, open_view

__all__ = [
    "Callback",
    "Checkpoint",
    "Config",
    "DataConfig",
    "EarlyStopping",
    "Metrics",
    "ModelConfig",
    "NoView",
    "OptimizerConfig",
    "RunConfig",
    "TextTrainer",
    "Trainer",
    "TrainingError",
    "View",
    "load",
    "load_last",
    "load_model",
    "open_view",
    "report_on",
]
