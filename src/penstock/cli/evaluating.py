"""`penstock eval`: how well a model predicts a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import penstock
from penstock.cli.generating import Quantization, refuse_quantized
from penstock.errors import SettingError
from penstock.terminal import phase, say, write_json

if TYPE_CHECKING:
    from penstock.models import Evaluation


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="The folder of a run or of a model in Hugging Face's layout, or a GGUF file."),
    ],
    data: Annotated[Path, typer.Option(help="A text file, or a folder of them.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; the model's context by default.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 8,
    quantize: Annotated[
        Quantization | None, typer.Option(help="Evaluate the model quantized to this as well.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for other programs.")] = False,
) -> None:
    """Measure how well a model predicts a text.

    That is its loss and its perplexity. Every token but the first is predicted from those before it in its
    window. With --quantize, there are those of the quantized model as well, and by how much its perplexity is
    higher.
    """
    from penstock.data import find_text
    from penstock.models.evaluating import evaluate as evaluated
    from penstock.train.loading import load_model

    if device:
        penstock.use(device)
    network, tokenizer = load_model(model)
    if quantize is not None:
        refuse_quantized(network)
    if tokenizer is None:
        raise SettingError(f"{model} has no tokenizer.json, which reading text needs")
    console, progress = Console(), Console(stderr=True)
    files = find_text(data)
    text = files.read()
    if files.skipped or files.replaced:
        say(progress, files.summary())
    with phase(progress, "tokenizing"):
        ids = tokenizer.encode(text)
    results: dict[str, Evaluation] = {}
    try:
        with phase(progress, "evaluating", len(ids)) as advance:
            results["as it is"] = evaluated(network, ids, context, batch, advance)
        if quantize is not None:
            penstock.quantize(network, quantize)
            with phase(progress, f"evaluating {quantize}", len(ids)) as advance:
                results[quantize] = evaluated(network, ids, context, batch, advance)
    except ValueError as error:
        raise SettingError(str(error)) from None
    size = len(text.encode(errors="replace"))
    figures = {name: _figures(result, size) for name, result in results.items()}
    plain = figures.pop("as it is")
    if as_json:
        write_json({**plain, **({"quantized": figures} if figures else {})})
        return
    say(console, _line(plain))
    for name, those in figures.items():
        more = those["perplexity"] - plain["perplexity"]
        share = 100 * more / plain["perplexity"]
        say(console, f"{name}: {_line(those)}; perplexity {more:+.3f} ({share:+.2f}%)")


def _figures(result: Evaluation, size: int) -> dict[str, float]:
    """What is told of an evaluation; `size`: bytes of the text."""
    bits = result.loss / math.log(2) * result.tokens / size
    return {
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": bits,
    }


def _line(figures: dict[str, float]) -> str:
    return (
        f"{figures['tokens']:,} tokens: loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.3f}, "
        f"{figures['bits_per_byte']:.3f} bits a byte"
    )
