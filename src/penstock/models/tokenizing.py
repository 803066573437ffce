"""The tokenizers of folders in Hugging Face's layout, and their chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from penstock.data import Tokenizer, load_tokenizer
from penstock.data.tokenizer import TextStream
from penstock.errors import CheckpointError
from penstock.files import atomic_file, parse_json, read_text
from penstock.models.settings import json_of
from penstock.printable import shown

if TYPE_CHECKING:
    import tokenizers
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """Text to ids and back: any `tokenizer.json`, with the special tokens that its model expects."""

    def __init__(
        self, model: tokenizers.Tokenizer, settings: Mapping[str, Any] | None = None, template: str = ""
    ) -> None:
        model.no_truncation()
        model.no_padding()
        self._model, self._settings, self.template = model, dict(settings or {}), template

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._model.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; `special`: with the tokens that begin or end one, where the model has them."""
        whole = text.encode(errors="replace").decode()
        return list(self._model.encode(whole, add_special_tokens=special).ids)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids, without special tokens. What is not UTF-8 becomes U+FFFD."""
        given = ids if isinstance(ids, list) else np.asarray(ids, np.int64).ravel().tolist()
        return self._model.decode(given, skip_special_tokens=True)

    def name(self, token: int) -> str:
        """The text of a single id; that of a special token, too."""
        return self._model.decode([token], skip_special_tokens=False)

    def stream(self) -> TextStream:
        """Decodes ids as they come."""
        return TextStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """The ids of a conversation, up to where the model is to answer, by the chat template.

        Messages are such as `{"role": "user", "content": "Hello"}`; further values go to the template.
        """
        if not self.template:
            raise CheckpointError(f"there is no chat template in {SETTINGS} or {TEMPLATE}")
        given: dict[str, Any] = {name: _content(self._settings.get(name)) for name in _SPECIAL}
        given |= {"tools": None, "documents": None, "add_generation_prompt": True}
        text = _rendered(self.template, given | values, messages)
        return self.encode(text, special=False)

    def to_json(self) -> str:
        """Its `tokenizer.json`."""
        return str(self._model.to_str())

    def save_to(self, folder: Path) -> None:
        """Write the files that `tokenizer_of` reads."""
        files = {TOKENIZER: self.to_json()}
        if self._settings:
            files[SETTINGS] = json.dumps(self._settings, indent=2) + "\n"
        if self.template and "chat_template" not in self._settings:
            files[TEMPLATE] = self.template
        for name, text in files.items():
            with atomic_file(folder / name) as file:
                file.write(text.encode())


def tokenizer_of(folder: Path) -> TextTokenizer | Tokenizer | None:
    """The tokenizer of a folder; None where there is none."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    settings: dict[str, Any] = {}
    try:
        content = read_text(path)
        if isinstance(state := parse_json(content), dict) and "type" in state:
            return load_tokenizer(path)  # of a run
        if (folder / SETTINGS).is_file():
            settings = json_of(folder / SETTINGS)
        template = read_text(folder / TEMPLATE) if (folder / TEMPLATE).is_file() else _template(settings)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from None
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} holds no usable tokenizer: {error}") from None
    return TextTokenizer(model, settings, template)


def _template(settings: Mapping[str, Any]) -> str:
    """The chat template in the settings; if there are several, the one that is called `default`."""
    given = settings.get("chat_template") or ""
    if isinstance(given, list):
        named = [item for item in given if isinstance(item, dict)]
        given = next((item.get("template") for item in named if item.get("name") == "default"), "")
    if not isinstance(given, str):
        raise ValueError(f"chat_template is a text, not {shown(given)}")
    return given


def _content(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _rendered(template: str, values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    environment = _environment()
    try:
        return environment.from_string(template).render(messages=list(messages), **values)
    except Exception as error:  # a template is a program, and may fail in any way
        raise CheckpointError(f"the chat template does not take these messages: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: that of transformers."""
    try:
        from jinja2 import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise CheckpointError("chat templates need jinja2: pip install 'penstock[chat]'") from None

    class Answers(Extension):
        """Takes the tags around answers, `{% generation %}`, which say what to train on, and nothing here."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Answers]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
