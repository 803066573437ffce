"""Optimizers and the schedules of their rates."""

from penstock.optim.optimizers import SGD, Adam, AdamW, Optimizer
from penstock.optim.schedules import Schedule, constant, cosine

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "Schedule", "constant", "cosine"]
