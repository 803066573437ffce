"""`penstock serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import penstock
from penstock.config import parse_bytes
from penstock.errors import PenstockWarning, SettingError
from penstock.terminal import phase, say

if TYPE_CHECKING:
    from penstock.models import Engine, LanguageModel


def serve(
    model: Annotated[
        Path,
        typer.Argument(help="The folder of a run or of a model in Hugging Face's layout, or a GGUF file."),
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 is reached from elsewhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str,
        typer.Option(help="What clients have to give.", envvar="PENSTOCK_API_KEY", metavar="KEY"),
    ] = "",
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; that of the folder by default.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences that are generated at a time.", min=1)] = 64,
    queue: Annotated[int, typer.Option(help="Sequences that may wait; others get 429.", min=1)] = 256,
    memory: Annotated[
        str | None, typer.Option(help="For keys and values, such as 4GiB.", metavar="BYTES")
    ] = None,
    request_bytes: Annotated[
        str, typer.Option(help="The most of a request; others get 413.", metavar="BYTES")
    ] = "4MiB",
    grace: Annotated[
        float, typer.Option(help="Seconds for answers to end after Ctrl-C or SIGTERM.", min=0.0)
    ] = 30.0,
    device: Annotated[str | None, typer.Option(help="A name from `penstock devices`, or auto.")] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's interface.

    Clients of OpenAI take http://HOST:PORT/v1 as their base URL, and browsers find a chat page at
    http://HOST:PORT.
    """
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise SettingError("an API key has letters, digits and signs of ASCII, and no space")
    try:
        from penstock import serving
    except ImportError:
        raise SettingError("serving needs starlette and uvicorn: pip install 'penstock[serve]'") from None
    if device:
        penstock.use(device)
    with serving.bound(host, port) as listener:  # first: an address that is taken is told at once
        network, engine = _loaded(model, slots, queue, memory)
        settings = serving.Settings(
            name=name or model.resolve().name,
            key=api_key,
            request_bytes=parse_bytes(request_bytes),
            requests=slots + queue,
            choices=queue,
            local=serving.is_local(listener),
        )
        url = serving.url_of(listener)
        if not (settings.local or settings.key):
            warnings.warn(f"no API key: whoever reaches {url} can use it", PenstockWarning, stacklevel=1)
        assert network.tokenizer is not None  # `_loaded` has refused others
        target = serving.Target(network.tokenizer, network.vocab_size, settings.name, engine.context)
        with engine:
            started = partial(say, Console(), f"{settings.name}: {url}")
            serving.run(engine, target, settings, listener, grace, started)


def _loaded(folder: Path, slots: int, queue: int, memory: str | None) -> tuple[LanguageModel, Engine]:
    from penstock.models import Engine
    from penstock.train.loading import load_model

    with phase(Console(stderr=True), "loading"):
        model, tokenizer = load_model(folder)
        if tokenizer is None:
            raise SettingError(f"{folder} has no tokenizer.json, which serving text needs")
        try:
            engine = Engine(model, slots=slots, memory=memory, queue=queue)
            # What cannot work fails here, not at the first request: such as a damaged generation_config.json.
            engine.submit([0], max_tokens=2).result()
        except ValueError as error:
            raise SettingError(str(error)) from None
        engine.prepare()
    return model, engine
