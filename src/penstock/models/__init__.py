"""Language models: families, folders in Hugging Face's layout, and generation."""

from penstock.models.attending import Attention, CacheShape
from penstock.models.engine import Engine, EngineStats, Request
from penstock.models.evaluating import Evaluation, evaluate
from penstock.models.loading import load
from penstock.models.model import LanguageModel
from penstock.models.registry import Family, build, families, family
from penstock.models.sampling import Sampling
from penstock.models.sequences import Completion, Piece
from penstock.models.tokenizing import TextTokenizer

__all__ = [
    "Attention",
    "CacheShape",
    "Completion",
    "Engine",
    "EngineStats",
    "Evaluation",
    "Family",
    "LanguageModel",
    "Piece",
    "Request",
    "Sampling",
    "TextTokenizer",
    "build",
    "evaluate",
    "families",
    "family",
    "load",
]
