"""Data for training: text and tokens, batches in a fixed shuffled order, and their way to the device."""

from penstock.data.batches import ArrayBatches, TextBatches
from penstock.data.errors import DataError
from penstock.data.prefetch import Prefetch
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
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "DataError",
    "Prefetch",
    "StreamDecoder",
    "Text",
    "TextBatches",
    "TokenStore",
    "Tokenizer",
    "find_text",
    "load_tokenizer",
    "python_sources",
    "train_bpe",
]
