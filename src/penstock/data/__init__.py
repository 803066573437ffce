"""Data for training: text and tokens, loaders of any dataset, batches in a fixed order, prefetching."""

from penstock.data.batches import ArrayBatches, TextBatches
from penstock.data.collate import collate, packed, padded
from penstock.data.datasets import Arrays, ImageFolder
from penstock.data.errors import DataError
from penstock.data.loader import Loader
from penstock.data.prefetch import Prefetch
from penstock.data.table import Table
from penstock.data.text import Text, find_text, python_sources
from penstock.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from penstock.data.tokens import TokenStore

__all__ = [
    "ArrayBatches",
    "Arrays",
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "DataError",
    "ImageFolder",
    "Loader",
    "Prefetch",
    "StreamDecoder",
    "Table",
    "Text",
    "TextBatches",
    "TokenStore",
    "Tokenizer",
    "collate",
    "find_text",
    "load_tokenizer",
    "packed",
    "padded",
    "python_sources",
    "train_bpe",
]
