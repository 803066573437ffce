"""`penstock eval`: how well a model predicts a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import penstock
from penstock.errors import SettingError
from penstock.terminal import phase, say, write_json


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
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for other programs.")] = False,
) -> None:
    """Measure how well a model predicts a text.

    That is its loss and its perplexity. Every token but the first is predicted from those before it in its
    window.
    """
    from penstock.data import find_text
    from penstock.models.evaluating import evaluate as evaluated
    from penstock.train.loading import load_model

    if device:
        penstock.use(device)
    network, tokenizer = load_model(model)
    if tokenizer is None:
        raise SettingError(f"{model} has no tokenizer.json, which reading text needs")
    console, progress = Console(), Console(stderr=True)
    text = find_text(data).read()
    with phase(progress, "tokenizing"):
        ids = tokenizer.encode(text)
    try:
        with phase(progress, "evaluating", len(ids)) as advance:
            result = evaluated(network, ids, context, batch, advance)
    except ValueError as error:
        raise SettingError(str(error)) from None
    bits = result.loss / math.log(2) * result.tokens / len(text.encode(errors="replace"))
    if as_json:
        figures = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": bits}
        write_json({"tokens": result.tokens, **figures})
        return
    say(
        console,
        f"{result.tokens:,} tokens: loss {result.loss:.4f}, perplexity {result.perplexity:.3f}, "
        f"{bits:.3f} bits a byte",
    )
