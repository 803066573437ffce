"""Tokenizers: text to ids and back. Every token stands for bytes, so that any ids can be decoded."""

from __future__ import annotations

import codecs
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.chunks import DividedText
from penstock.data.errors import DataError
from penstock.data.files import written_whole
from penstock.data.text import LARGE, Progress, Text, no_text, pieces, silent, size_of
from penstock.files import parse_json, read_text

if TYPE_CHECKING:
    import tokenizers

Ids = npt.NDArray[np.int32]


class Decodes(Protocol):
    """What has text for ids."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids."""


class Tokenizer(ABC):
    """What all tokenizers can do.

    >>> tokenizer: ps.data.Tokenizer = ps.data.ByteTokenizer()
    >>> tokenizer.decode(tokenizer.encode("any text"))
    'any text'
    """

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    @property
    def vocab_size(self) -> int:
        """How many ids there are: from 0 to this, exclusive."""
        return len(self._tokens)

    def encode(self, text: str) -> Ids:
        """The ids of a text. A lone surrogate, which no UTF-8 has, counts as a question mark."""
        try:
            return self._encode(text)
        except UnicodeEncodeError:
            return self._encode(text.encode(errors="replace").decode())

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids. What is not UTF-8, as in a half character, becomes U+FFFD."""
        return self._bytes(ids).decode(errors="replace")

    def stream(self) -> StreamDecoder:
        """Decodes ids as they come, for a terminal."""
        return StreamDecoder(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file, for `load_tokenizer`."""
        with written_whole(Path(path)) as file:
            file.write(self.to_json().encode())

    @abstractmethod
    def to_json(self) -> str:
        """Its content as JSON; the same for tokenizers that give the same ids."""

    @abstractmethod
    def _encode(self, text: str) -> Ids:
        """`encode`; raises UnicodeEncodeError for surrogates."""

    def _bytes(self, ids: npt.ArrayLike) -> bytes:
        values = np.asarray(ids).ravel()
        if not values.size:
            return b""
        for number in (values.min(), values.max()):
            if not 0 <= number < len(self._tokens):
                raise DataError(f"there is no token {number}; this tokenizer has 0 to {self.vocab_size - 1}")
        return b"".join([self._tokens[number] for number in values.tolist()])


class StreamDecoder:
    """Decodes ids incrementally: an incomplete character waits for its other bytes.

    The concatenation of all its results is what `decode` gives for all the ids.

    >>> stream = ps.data.ByteTokenizer().stream()
    >>> [stream.push([byte]) for byte in "é".encode()]
    ['', 'é']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: npt.ArrayLike) -> str:
        """The text that further ids complete."""
        return self._decoder.decode(self._tokenizer._bytes(ids))

    def finish(self) -> str:
        """The rest that was held back."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 ids, for any text.

    >>> ps.data.ByteTokenizer().encode("abc").tolist()
    [97, 98, 99]
    """

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)])

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return json.dumps({"type": "bytes"})

    def _encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class CharTokenizer(Tokenizer):
    """The distinct characters of a text, in the order of their code points. It encodes no others.

    >>> tokenizer = ps.data.CharTokenizer("cabbage")
    >>> tokenizer.encode("abc").tolist(), tokenizer.vocab_size
    ([0, 1, 2], 5)
    """

    def __init__(self, text: str | Text) -> None:
        characters: set[str] = set()
        for piece in pieces(text):
            characters.update(piece)
        if not characters:
            raise no_text(text)
        self._characters = "".join(sorted(characters))
        super().__init__([character.encode() for character in self._characters])
        self._ids = np.full(ord(self._characters[-1]) + 2, -1, np.int32)  # the last: for characters beyond
        self._ids[_code_points(self._characters)] = np.arange(len(self._characters), dtype=np.int32)

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return json.dumps({"type": "characters", "characters": self._characters})

    def _encode(self, text: str) -> Ids:
        ids = self._ids.take(_code_points(text), mode="clip")
        if len(ids) and ids.min() < 0:
            unknown = " ".join(map(repr, sorted(set(text) - set(self._characters))[:8]))
            raise DataError(f"this tokenizer knows {self.vocab_size} characters, and not {unknown}")
        return ids


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, computed by the `tokenizers` library: any text, in few ids.

    >>> tokenizer = ps.data.train_bpe("low lower lowest " * 9, 260)
    >>> tokenizer.decode(tokenizer.encode("lower"))
    'lower'
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        super().__init__(_bpe_tokens(model))
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._cuts = _may_be_cut(json.loads(model.to_str()))
        self._added = [token.content for token in model.get_added_tokens_decoder().values()]
        self._known: dict[str, bytes] = {}  # a cache of the ids of words, which is faster than the library

    def to_json(self) -> str:
        """See `Tokenizer.to_json`. The format is the library's: the `tokenizer.json` of Hugging Face."""
        return self._model.to_str()

    def _encode(self, text: str) -> Ids:
        text.encode()  # the library's error for surrogates is a TypeError
        whole = not self._cuts or any(added in text for added in self._added)
        if whole:
            return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)
        words = _WORD.findall(text)
        if not words[-1]:
            words.pop()
        known = self._known
        if len(known) > _WORDS_KNOWN:
            self._known = known = {}  # a new dict: another thread may be reading the old
        new = [word for word in dict.fromkeys(words) if word not in known]
        encodings = self._model.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            known[word] = np.array(encoding.ids, np.int32).tobytes()
        return np.frombuffer(b"".join([known[word] for word in words]), np.int32)


class TextStream:
    """Decodes ids incrementally: an incomplete character waits for its other tokens.

    A tokenizer may put a space before a word or not, depending on what is before, so that the tokens of the
    last piece are decoded again with the next.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was returned

    def follow(self, ids: Sequence[int]) -> None:
        """Begin after these ids: a first word that a tokenizer writes without its space has it then."""
        if not self._tokenizer.decode(list(ids)).endswith("\ufffd"):  # half a character
            self._ids, self._shown = list(ids), len(ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that further ids complete."""
        self._ids += ids
        return self._new(whole=False)

    def finish(self) -> str:
        """The rest that was held back."""
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        text = self._tokenizer.decode(self._ids)
        if (text.endswith("\ufffd") and not whole) or len(text) < len(before):
            return ""
        new = text[len(before) :]
        if new:  # what is before it is not needed any more
            self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return new


class LibraryTokenizer(Tokenizer):
    """Any other tokenizer of the `tokenizers` library: the `tokenizer.json` of a model."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        super().__init__([])
        model.no_truncation()
        model.no_padding()
        self._model = model

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self._model.get_vocab_size()

    def decode(self, ids: npt.ArrayLike) -> str:
        """See `Tokenizer.decode`."""
        return self._model.decode(np.asarray(ids, np.int64).ravel().tolist(), skip_special_tokens=False)

    def stream(self) -> TextStream:  # type: ignore[override]
        """See `Tokenizer.stream`."""
        return TextStream(self)

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return self._model.to_str()

    def _encode(self, text: str) -> Ids:
        text.encode()  # the library's error for surrogates is a TypeError
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)


# Words with the white space before them. The pattern of byte-level tokenizers always ends a token between
# visible ASCII and a space or a line break, and between ASCII letters, digits and signs, except that an
# apostrophe may belong to the letters after it. So cutting there, and only there, changes no id.
_RUN = r"(?:[A-Za-z]+|[0-9]+|[!-/:-@\[-`{-~]+(?:(?<=')[A-Za-z0-9]+)?)"
_WORD = re.compile(rf"[^!-~]*(?:{_RUN}(?:[^!-~ \n][^!-~]*(?:{_RUN}|\Z))*|\Z)")
_WORDS_KNOWN = 1 << 17
_TRAINED_ON = 4 << 20  # bytes of a large text


def train_bpe(text: str | Text, vocab_size: int, progress: Progress = silent) -> BPETokenizer:
    """A byte-level BPE tokenizer trained on `text`: `vocab_size` ids, or fewer if the text is short.

    It is trained on 4 MiB of a text of more than 16 MiB: on parts of it at even distances.

    >>> tokenizer = ps.data.train_bpe("low lower lowest " * 9, 260)
    >>> len(tokenizer.encode("low")) < 3
    True
    """
    if vocab_size < 256:
        raise DataError(f"byte-level BPE needs a vocabulary of 256 or more, and {vocab_size} was asked for")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = DividedText(text).sample(_TRAINED_ON) if isinstance(text, Text) and text.nbytes > LARGE else text
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(_BYTES)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    with progress("training the tokenizer", size_of(text)) as advance:
        model.train_from_iterator(_not_empty(text, advance), trainer)
    return BPETokenizer(model)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer from the file that `save` wrote, or from a `tokenizer.json` of Hugging Face.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "tokenizer.json")
    >>> ps.data.ByteTokenizer().save(path)
    >>> ps.data.load_tokenizer(path).vocab_size
    256
    """
    try:
        return tokenizer_from_json(read_text(Path(path)))
    except OSError as error:
        raise DataError(f"the tokenizer {path} could not be read: {error.strerror}") from error
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} holds no usable tokenizer: {error}") from error


def tokenizer_from_json(content: str) -> Tokenizer:
    """The tokenizer whose `to_json` gave a text; any Exception if it is none."""
    state = parse_json(content)
    if state.get("type") == "bytes":
        return ByteTokenizer()
    if state.get("type") == "characters":
        return CharTokenizer(state["characters"])
    if isinstance(state.get("model"), dict):
        from tokenizers import Tokenizer

        model = Tokenizer.from_str(content)
        return BPETokenizer(model) if _is_byte_level(state) else LibraryTokenizer(model)
    raise DataError("it is of no kind that is known: bytes, characters, or one of the tokenizers library")


def _not_empty(text: str | Text, advance: Callable[[int], None]) -> Iterable[str]:
    piece = ""
    for piece in pieces(text):
        yield piece
        advance(len(piece.encode(errors="replace")))
    if not piece:
        raise no_text(text)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary; visible ASCII stands for itself."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()


def _bpe_tokens(model: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id, in order."""
    words = {number: word for word, number in model.get_vocab(with_added_tokens=False).items()}
    added = model.get_added_tokens_decoder()
    tokens = []
    for number in range(max([*words, *added], default=-1) + 1):
        if number in added:
            tokens.append(added[number].content.encode())
        elif number in words and all(character in _BYTES for character in words[number]):
            tokens.append(bytes([_BYTES[character] for character in words[number]]))
        else:
            raise DataError(f"its token {number}, {words.get(number)!r}, is none of a byte-level vocabulary")
    return tokens


def _is_byte_level(state: dict[str, Any]) -> bool:
    """Whether the vocabulary of a tokenizer consists of bytes, which its decoder says."""
    return state["model"].get("type") == "BPE" and (state.get("decoder") or {}).get("type") == "ByteLevel"


def _may_be_cut(state: dict[str, Any]) -> bool:
    """Whether the ids of a text are the concatenated ids of its words."""
    split = state["pre_tokenizer"] or {}
    if split.get("type") != "ByteLevel" or not split.get("use_regex", True) or split["add_prefix_space"]:
        return False
    return state["normalizer"] is None
