"""`penstock generate`: text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.errors import SettingError
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock.models import LanguageModel


class Quantization(StrEnum):
    """What the weights of linear layers are quantized to."""

    INT8 = "int8"
    INT4 = "int4"


def generate(
    model: Annotated[
        Path, typer.Argument(help="The folder of a run, or of a model in Hugging Face's layout.")
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue; ids if there is no tokenizer.")] = "",
    tokens: Annotated[int, typer.Option(help="How many to generate.", min=0)] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest. Default: of generation_config.json, or 0.8.", min=0.0
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Only so many of the likeliest.", min=1)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest with this total probability.", min=0.0, max=1.0)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only those with this share of the likeliest's.", min=0.0, max=1.0)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="More than 1: what was there is less likely.", min=0.0)
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends before this text; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", min=0)] = None,
    quantize: Annotated[
        Quantization | None, typer.Option(help="Quantize the weights of linear layers to this.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
) -> None:
    """Generate text with a trained model, shown as it comes."""
    from penstock.train.loading import load_model

    if device:
        penstock.use(device)
    network, tokenizer = load_model(model)
    if quantize is not None:
        refuse_quantized(network)
        penstock.quantize(network, quantize)
    has_text = tokenizer is not None
    given: Any = prompt or "\n"
    if not has_text:
        try:
            given = [int(part) for part in prompt.split()] or [0]
        except ValueError:
            raise SettingError(
                f"{model} has no tokenizer.json, so a prompt is ids such as '17 4', and {prompt!r} was given"
            ) from None
    usual = 0.8 if network.generation_config.get("do_sample") is None else None
    options = {
        "temperature": usual if temperature is None else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "seed": seed,
    }
    try:
        pieces = network.stream(given, tokens, **options)
        stream(
            [prompt] if has_text else [],
            (piece.text if has_text else f"{piece.id} " for piece in pieces),
        )
    except ValueError as error:  # ids that the model does not have, and the like
        raise SettingError(str(error)) from None


def refuse_quantized(network: LanguageModel) -> None:
    """Raise where --quantize would change nothing."""
    if any(isinstance(layer, penstock.nn.QuantizedLinear) for layer in network.modules()):
        raise SettingError("the model is quantized already, and --quantize is for one that is not")


def stream(*parts: Iterable[str]) -> str:
    """Write text as it is generated, until Ctrl-C; the whole text. Control characters are escaped."""
    written = []
    obeys = sys.stdout.isatty()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        for pieces in parts:
            for piece in pieces:
                written.append(piece)
                sys.stdout.write(printable(piece) if obeys else piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    sys.stdout.write("\n")
    return "".join(written)
