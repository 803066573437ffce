"""A server process for tests: `penstock serve` with a tiny model, and what clients do with it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import openai
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from test_generation import SIZES, byte_level

import penstock as ps
from penstock.models import Engine, LanguageModel, TextTokenizer
from penstock.serving import Service, Settings, Target
from penstock.serving.app import application
from penstock.serving.backend import Backend
from penstock.serving.link import Link

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"
PATIENCE = 60.0  # seconds for what should happen at once, on a busy machine
CONTEXT = 4096  # so that an answer can take long


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    """A model that was not trained, with a tokenizer of bytes."""
    ps.random.manual_seed(1)
    sizes = {**SIZES, "vocab_size": 258, "initializer_range": 0.3, "max_position_embeddings": CONTEXT}
    model = ps.models.build(sizes, device="host")
    model.tokenizer = TextTokenizer(byte_level(special=True), {"bos_token": {"content": "<s>"}}, template)
    model.save(folder)
    return folder


@contextmanager
def in_process(engine: Engine, model: LanguageModel) -> Iterator[TestClient]:
    """A client of a server whose two processes are this one."""
    ours, theirs = socket.socketpair()
    link = Link(ours)
    Backend(engine, link)
    assert model.tokenizer is not None
    target = Target(model.tokenizer, model.vocab_size, "tiny", engine.context)
    try:
        with TestClient(application(Service(target, Settings("tiny", local=False), theirs))) as client:
            yield client
    finally:
        link.close()


class Served:
    """A running server. What it writes to its log is in `log`."""

    def __init__(
        self, folder: Path, *options: str, port: int = 0, key: str = "", first: str = "", **more: Any
    ) -> None:
        """`first` is run by the process before the command; `more` is for `Popen`."""
        self.key = key
        words = ["serve", str(folder), "--port", str(port), "--device", "host", *options]
        program = f"{first}\nfrom penstock.cli import main\nmain()"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        self._clients: dict[str, openai.OpenAI] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PENSTOCK_API_KEY": key},
            **more,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.name, self.url = line.strip().split(": ", 1)
        self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def client(self, key: str = "") -> openai.OpenAI:
        key = key or self.key or "none"
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE
            )
        return self._clients[key]

    def connection(self) -> http.client.HTTPConnection:
        assert self.host is not None
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def ask(
        self, path: str, body: Any = None, *, method: str = "", headers: Mapping[str, str] = {}
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, content and headers of an answer; a body that is not bytes is sent as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connection()
        try:
            typed = {"Content-Type": "application/json"} if content is not None else {}
            connection.request(method or ("POST" if typed else "GET"), path, content, {**typed, **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, answer.headers

    def figures(self) -> dict[str, float]:
        """The metrics that have no labels, as Prometheus reads them."""
        text = self.ask("/metrics", headers={"Authorization": f"Bearer {self.key}"})[1]
        families = text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples if not sample.labels]
        return {sample.name.removeprefix("penstock_"): sample.value for sample in samples}

    def wait_until(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until the metrics are as they should be."""
        end = time.monotonic() + PATIENCE
        while not condition(figures := self.figures()):
            assert time.monotonic() < end, figures
            time.sleep(0.02)
        return figures

    def wait(self) -> int:
        """The exit status, when the process ends by itself."""
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, as Ctrl-C does."""
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
