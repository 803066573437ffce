"""`penstock chat`: a conversation with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.cli.generating import Quantization, refuse_quantized, stream
from penstock.errors import SettingError

_ASKS = "> "


def chat(
    model: Annotated[Path, typer.Argument(help="The folder of a model with a chat template.")],
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    tokens: Annotated[int, typer.Option(help="The most of an answer.", min=1)] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token.", min=0.0)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest with this total probability.", min=0.0, max=1.0)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.", min=0)] = None,
    quantize: Annotated[
        Quantization | None, typer.Option(help="Quantize the weights of linear layers to this.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
) -> None:
    """Talk to a model that has a chat template.

    A line is a message. Ctrl-C ends an answer, and Ctrl-D the conversation.
    """
    from penstock.models import TextTokenizer
    from penstock.train.loading import load_model

    if device:
        penstock.use(device)
    network, tokenizer = load_model(model)
    if quantize is not None:
        refuse_quantized(network)
        penstock.quantize(network, quantize)
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.template:
        raise SettingError(f"{model} has no chat template; `penstock generate` continues a text with it")
    messages = [{"role": "system", "content": system}] if system else []
    options = {"temperature": temperature, "top_p": top_p, "seed": seed}
    for line in _lines():
        messages.append({"role": "user", "content": line})
        ids = tokenizer.chat(messages)
        try:
            answer = stream(piece.text for piece in network.stream(ids, tokens, **options))
        except ValueError as error:  # such as a damaged generation_config.json
            raise SettingError(str(error)) from None
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """What the user types, or what comes from a pipe, without empty lines."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            sys.stdout.write(_ASKS)
            sys.stdout.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            return
        if line.strip():
            yield line.strip()
