"""Servers that are full, guarded, left by their clients, told to end, killed, or whose engine fails."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import served
from served import Served
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.errors import SettingError

LONG = 3000  # tokens that take seconds
TEXT = "/v1/completions"

Start = Callable[..., Served]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    servers: list[Served] = []

    def started(*options: str, **more: Any) -> Served:
        servers.append(Served(folder, *options, **more))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def begun(server: Served, tokens: int = LONG) -> Any:
    """A stream whose first piece has come."""
    stream = server.client().completions.create(
        model="tiny", prompt="a" * 40, max_tokens=tokens, temperature=0, stream=True
    )
    next(iter(stream))
    return stream


def http_process(server: Served) -> psutil.Process:
    """The process that has the server's address."""
    (process,) = (
        child
        for child in psutil.Process(server.process.pid).children()
        if any(each.laddr.port == server.port for each in child.net_connections())
    )
    return process


def test_a_full_queue_is_told_and_those_who_leave_make_room(start: Start) -> None:
    server = start("--slots", "1", "--queue", "2")
    streams = [begun(server)]
    waiting = [server.connection() for _ in range(2)]
    body = b'{"prompt": "a", "max_tokens": 3000}'
    for number, connection in enumerate(waiting):
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        server.wait_until(lambda figures, number=number: figures["sequences_waiting"] == number + 1)
    for stream in (False, True):
        status, tree, headers = server.ask(TEXT, {"prompt": "a", "stream": stream})
        assert status == 429
        assert headers["Retry-After"] == "1"
        assert tree["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        server.client().completions.create(model="tiny", prompt="a")
    assert server.ask("/health")[0] == 200, "a full server is alive"
    # Those that wait leave, and the one that runs: all of them give back what they hold.
    for connection in waiting:
        connection.close()
    server.wait_until(lambda figures: figures["sequences_waiting"] == 0)
    assert server.figures()["sequences_running"] == 1
    streams[0].close()
    figures = server.wait_until(lambda figures: figures["sequences_running"] == 0)
    assert figures["pages_used"] == 0
    assert figures["sequences_cancelled_total"] == 3
    assert server.client().completions.create(model="tiny", prompt="a", max_tokens=2).choices
    assert 'status="499"} ' in server.ask("/metrics")[1]


@pytest.mark.slow
def test_all_choices_of_a_request_are_cancelled_together(start: Start) -> None:
    server = start("--slots", "4", "--queue", "8")
    connection = server.connection()
    connection.request(
        "POST", TEXT, b'{"prompt": "a", "n": 8, "max_tokens": 3000}', {"Content-Type": "application/json"}
    )
    server.wait_until(lambda figures: figures["sequences_running"] == figures["sequences_waiting"] == 4)
    # Not all of a request that does not fit is taken.
    status, _, _ = server.ask(TEXT, {"prompt": "b", "n": 8})
    assert status == 429
    assert (
        server.wait_until(lambda figures: figures["sequences_cancelled_total"] == 4)["sequences_waiting"] == 4
    )
    connection.close()
    figures = server.wait_until(lambda figures: figures["sequences_cancelled_total"] == 12)
    assert figures["sequences_running"] == figures["sequences_waiting"] == figures["pages_used"] == 0


@pytest.mark.slow
def test_memory_bounds_what_a_request_may_ask_for(start: Start) -> None:
    server = start("--memory", "32KiB", "--host", "0.0.0.0")
    assert "no API key: whoever reaches http://0.0.0.0:" in server.log
    (listed,) = server.ask("/v1/models")[1]["data"]
    most = listed["max_model_len"]
    assert 16 <= most < served.CONTEXT
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    answer = server.client().chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == most, "an answer without a limit may fill the context"
    with pytest.raises(openai.BadRequestError, match=f"a context of {most} tokens"):
        server.client().completions.create(model="tiny", prompt="a", max_tokens=most)


def test_a_key_is_asked_for(start: Start) -> None:
    server = start("--name", "mine", key="a-secret")
    assert server.name == "mine"
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic a-secret"},
        {"Authorization": "é"},
    ):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            status, tree, answered = server.ask(path, headers=headers)
            assert status == 401
            assert tree["error"]["code"] == "invalid_api_key"
            assert answered["WWW-Authenticate"] == "Bearer"
        assert server.ask(TEXT, {"prompt": "a"}, headers=headers)[0] == 401
    with pytest.raises(openai.AuthenticationError):
        server.client("a-secre").completions.create(model="mine", prompt="a")
    assert server.client().completions.create(model="mine", prompt="a", max_tokens=1).choices
    assert server.ask("/health")[0] == 200
    assert "a-secret" not in server.ask("/")[1]
    # With a key, a proxy may use any name.
    assert server.ask("/health", headers={"Host": "models.example"})[0] == 200


# The end


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_answers_are_finished_after_a_signal(start: Start, number: signal.Signals) -> None:
    server = start()
    stream = begun(server, tokens=120)
    idle = server.connection()
    idle.connect()
    server.process.send_signal(number)
    parts = list(stream)
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.wait() == 0
    assert server.log == ""
    with pytest.raises(ConnectionRefusedError):
        server.connection().connect()
    idle.close()


@pytest.mark.slow
def test_answers_that_take_too_long_are_cancelled_and_told(start: Start) -> None:
    server = start("--grace", "0.2")
    stream = begun(server)
    connection = server.connection()
    connection.request(
        "POST", TEXT, b'{"prompt": "a", "max_tokens": 3000}', {"Content-Type": "application/json"}
    )
    server.wait_until(lambda figures: figures["sequences_running"] == 2)
    server.process.terminate()
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(stream)
    assert connection.getresponse().status == 503
    connection.close()
    assert server.wait() == 0
    assert server.log == ""


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start()
    stream = begun(server)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 130
    with pytest.raises(openai.APIConnectionError):
        list(stream)


@pytest.mark.skipif(os.name != "posix", reason="there are no groups of processes")
def test_a_signal_to_both_processes_is_one(start: Start) -> None:
    """As Ctrl-C in a terminal, or the end of a service, whose processes all get SIGTERM."""
    server = start(start_new_session=True)
    stream = begun(server, tokens=120)
    os.killpg(server.process.pid, signal.SIGINT)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.wait() == 0
    assert server.log == ""


def test_a_server_without_its_process_of_http_ends(start: Start) -> None:
    server = start()
    stream = begun(server)
    http_process(server).kill()
    assert server.wait() == 1
    assert "the process of HTTP has ended with status" in server.log
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_a_killed_server_is_started_again_at_its_address(start: Start) -> None:
    server = start()
    stream = begun(server)
    other = http_process(server)
    server.process.kill()
    assert server.wait() == -signal.SIGKILL
    other.wait(served.PATIENCE)
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    again = start(port=server.port)
    assert again.port == server.port
    assert again.figures()["pages_used"] == 0
    answer = again.client().completions.create(model="tiny", prompt="a", max_tokens=5, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


FAILS = """
from penstock.models.decoders import Decoder
tokens, left = Decoder.tokens, [20]
def failing(self, *given):
    left[0] -= 1
    if left[0] < 0:
        raise MemoryError("a device is gone")
    return tokens(self, *given)
Decoder.tokens = failing
"""


def test_an_engine_that_fails_is_told(start: Start) -> None:
    server = start(first=FAILS)
    connection = server.connection()
    stream = begun(server)
    connection.request(
        "POST", TEXT, b'{"prompt": "a", "max_tokens": 3000}', {"Content-Type": "application/json"}
    )
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(stream)
    assert connection.getresponse().status == 500
    connection.close()
    with pytest.raises(openai.InternalServerError, match="the engine has failed"):
        server.client().completions.create(model="tiny", prompt="a")
    status, tree, _ = server.ask("/health")
    assert status == 503
    assert tree["error"]["type"] == "server_error"
    assert 'path="/v1/completions",status="500"} 3' in server.ask("/metrics")[1]
    assert server.log.count("a device is gone") == 1
    server.process.terminate()
    assert server.wait() == 0


# The command


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, SettingError), result.output
    return str(result.exception)


def test_what_cannot_be_served_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen at 127.0.0.1 port {port}: " in refusal(str(folder), "--port", port)
    assert "cannot listen at nowhere.invalid" in refusal(str(folder), "--host", "nowhere.invalid")
    assert "no space" in refusal(str(folder), "--api-key", "two words")
    default = ps.default_device()
    try:
        ps.models.build(ps.models.load(folder, device="host").config, device="host").save(tmp_path / "bare")
        bare = refusal(str(tmp_path / "bare"), "--port", "0", "--device", "host")
    finally:
        ps.use(default)
    assert "no tokenizer.json, which serving text needs" in bare
    for name in [name for name in sys.modules if name.startswith("penstock.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ps, "serving", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'penstock[serve]'" in refusal(str(folder))
