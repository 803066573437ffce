"""`penstock chat` and `penstock eval`: conversations, and how well a model predicts a text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_generation import SIZES, byte_level
from typer.testing import CliRunner, Result

import penstock as ps
from penstock.cli import app
from penstock.errors import PenstockError, PenstockWarning, SettingError
from penstock.models import LanguageModel, TextTokenizer, evaluate

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"


@pytest.fixture(autouse=True)
def _same_device() -> Iterator[None]:
    default = ps.default_device()
    yield
    ps.use(default)


def penstock(*arguments: str, typed: str = "") -> Result:
    result = CliRunner().invoke(app, list(arguments), input=typed, env={"COLUMNS": "200"})
    if isinstance(result.exception, PenstockError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was not trained, with a tokenizer of bytes and a chat template."""
    path = tmp_path_factory.mktemp("model")
    ps.random.manual_seed(1)
    model = ps.models.build({**SIZES, "vocab_size": 258}, device="host")
    model.tokenizer = TextTokenizer(byte_level(special=True), {"bos_token": {"content": "<s>"}}, TEMPLATE)
    model.save(path)
    return path


@pytest.mark.parametrize(("context", "batch"), [(None, 8), (16, 3), (7, 1), (128, 64)])
def test_the_loss_is_that_of_every_token_in_its_window(context: int | None, batch: int) -> None:
    ps.random.manual_seed(2)
    model = ps.models.build({**SIZES, "initializer_range": 0.3}, device="host")
    ids = np.random.default_rng(0).integers(0, 40, 300)
    losses = []
    length = context or model.context
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1]
        logits = model(ps.asarray(window[np.newaxis, :-1], device="host")).numpy()[0].astype(np.float64)
        likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses += (-likely[np.arange(len(window) - 1), window[1:]]).tolist()
    told: list[int] = []
    result = evaluate(model, ids, context, batch, told.append)
    assert result.tokens == len(losses) == len(ids) - 1 == sum(told)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_what_cannot_be_evaluated_is_refused(folder: Path, tmp_path: Path) -> None:
    model = ps.models.load(folder, device="host")
    with pytest.raises(ValueError, match="nothing to predict in a text of 1 tokens"):
        evaluate(model, [5])
    with pytest.raises(ValueError, match=r"a context is from 1 to 128, .*and 129 and 8 were given"):
        evaluate(model, [5, 6], context=129)
    text = tmp_path / "text.txt"
    text.write_text("some text")
    bare = tmp_path / "bare"
    ps.models.build(SIZES, device="host").save(bare)
    with pytest.raises(SettingError, match=r"no tokenizer\.json, which reading text needs"):
        penstock("eval", str(bare), "--data", str(text), "--device", "host")


def test_the_command_tells_loss_and_perplexity(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    words = ("eval", str(folder), "--data", str(text), "--device", "host", "--context", "32")
    figures = json.loads(penstock(*words, "--json").stdout)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["loss"] == pytest.approx(math.log(258), rel=0.1), "an untrained model knows nothing"
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2), rel=0.01)
    assert penstock(*words).stdout.startswith(f"{figures['tokens']:,} tokens: loss {figures['loss']:.4f}")


def test_the_command_compares_a_quantized_model(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 5)
    words = ("eval", str(folder), "--data", str(text), "--device", "host", "--context", "32")
    figures = json.loads(penstock(*words, "--quantize", "int8", "--json").stdout)
    of_int8 = figures["quantized"]["int8"]
    assert of_int8["tokens"] == figures["tokens"]
    assert of_int8["loss"] != figures["loss"]
    assert of_int8["loss"] == pytest.approx(figures["loss"], rel=0.01)
    model = ps.quantize(ps.models.load(folder, device="host"), "int4")
    assert isinstance(model, LanguageModel)
    assert model.tokenizer is not None
    wanted = evaluate(model, model.tokenizer.encode(text.read_text()), 32)
    plain, line = penstock(*words, "--quantize", "int4").stdout.splitlines()
    more = wanted.perplexity - figures["perplexity"]
    assert plain.startswith(f"{figures['tokens']:,} tokens: loss {figures['loss']:.4f}")
    assert line.startswith(f"int4: {figures['tokens']:,} tokens: loss {wanted.loss:.4f}, perplexity")
    assert f"; perplexity {more:+.3f} (" in line
    generate = (
        "generate",
        str(folder),
        "--prompt",
        "the",
        "--tokens",
        "5",
        "--temperature",
        "0",
        "--device",
        "host",
    )
    result = penstock(*generate, "--quantize", "int4").stdout
    assert result == f"the{model.generate('the', 5, temperature=0).text}\n"


def test_the_command_says_what_it_could_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and more text")
    words = ("eval", str(folder), "--data", str(tmp_path / "a.txt"), "--device", "host")
    assert "not UTF-8, and replaced by U+FFFD: 1 places" in penstock(*words).stderr
    (tmp_path / "a.txt").write_text("some text")
    assert penstock(*words).stderr == ""


def test_a_quantized_model_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    ps.quantize(ps.models.load(folder, device="host"), "int8").save(tmp_path / "int8")
    (tmp_path / "text.txt").write_text("the quick brown fox")
    for words in (("generate",), ("chat",), ("eval", "--data", str(tmp_path / "text.txt"))):
        with pytest.raises(SettingError, match="the model is quantized already"):
            penstock(*words, str(tmp_path / "int8"), "--quantize", "int4", "--device", "host")


def test_a_prompt_that_is_longer_than_the_context_is_told(folder: Path) -> None:
    model = ps.models.load(folder, device="host")
    prompt = [at % 250 for at in range(model.context + 5)]
    message = f"a prompt has {model.context + 5} tokens, and the model reads the last {model.context} of them"
    with pytest.warns(PenstockWarning, match=message):
        answer = model.generate(prompt, 4, temperature=0)
    assert answer.ids == model.generate(prompt[5:], 4, temperature=0).ids
    with pytest.warns(PenstockWarning, match=message), ps.models.Engine(model, slots=1) as engine:
        assert engine.submit(prompt, max_tokens=4, temperature=0).result().ids == answer.ids


def test_a_conversation_goes_on_from_what_was_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    chat = TextTokenizer.chat

    def noted(self: TextTokenizer, messages: list[dict[str, str]]) -> list[int]:
        asked.append(self.decode(ids := chat(self, messages)))
        return ids

    monkeypatch.setattr(TextTokenizer, "chat", noted)
    words = (
        "chat",
        str(folder),
        "--device",
        "host",
        "--tokens",
        "6",
        "--temperature",
        "0",
        "--system",
        "be kind",
    )
    answers = penstock(*words, typed="hello\n\nand you?\n").stdout.splitlines()
    assert asked[0] == "s:be kind;u:hello;"
    assert asked[1].startswith("s:be kind;u:hello;a:")
    assert asked[1].endswith(";u:and you?;")
    assert len(answers) >= 2
    assert penstock(*words, typed="hello\n\nand you?\n").stdout.splitlines() == answers
    assert penstock(*words, typed="").stdout == ""


def test_a_model_without_a_template_is_sent_elsewhere(tmp_path: Path) -> None:
    ps.models.build(SIZES, device="host").save(tmp_path / "bare")
    with pytest.raises(SettingError, match="no chat template; `penstock generate` continues a text"):
        penstock("chat", str(tmp_path / "bare"), "--device", "host")
