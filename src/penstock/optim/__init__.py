"""Optimizers and learning-rate schedules."""

from penstock.optim import lr_scheduler
from penstock.optim.adam import LAMB, Adam, Adamax, AdamW, Lion, NAdam, RAdam
from penstock.optim.adaptive import Adadelta, Adafactor, Adagrad, RMSprop
from penstock.optim.groups import ParamGroup
from penstock.optim.muon import Muon
from penstock.optim.optimizer import Optimizer
from penstock.optim.schedules import Schedule, constant, cosine
from penstock.optim.sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "ParamGroup",
    "RAdam",
    "RMSprop",
    "Schedule",
    "constant",
    "cosine",
    "lr_scheduler",
]
