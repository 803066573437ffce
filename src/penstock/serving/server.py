"""A server: a socket, the process of HTTP that it is handed to, and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from ipaddress import ip_address
from multiprocessing.process import BaseProcess
from types import FrameType

from rich.console import Console

from penstock.errors import PenstockError, SettingError
from penstock.models import Engine
from penstock.serving import front
from penstock.serving.backend import Backend
from penstock.serving.link import End, Link
from penstock.serving.parameters import Target
from penstock.serving.service import Settings
from penstock.terminal import phase

_LOOK_SECONDS = 0.05  # between two looks at what the engine has built
_JOIN_SECONDS = 1.0  # after which Ctrl-C is noticed where it does not end a wait
_SWITCH_SECONDS = 0.0005  # after which the engine's thread may run; by default, ten times as long
_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform == "win32":
    _SIGNALS.append(signal.SIGBREAK)


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet; port 0 is any that is free."""
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            result = opened.enter_context(socket.socket(family, kind, protocol))
            if os.name == "posix":  # an address is free as soon as its last server has ended
                result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            result.bind(address)
        except (OSError, UnicodeError) as error:
            raise SettingError(f"cannot listen at {host} port {port}: {error}") from None
        opened.pop_all()
    return result


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """The address of a socket for browsers."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    engine: Engine,
    target: Target,
    settings: Settings,
    listener: socket.socket,
    grace: float,
    started: Callable[[], None],
) -> None:
    """Answer requests until the process is told to end by SIGINT or SIGTERM; closes the socket.

    `started` is called when the engine has built its programs; requests before that wait. Answers that are on
    their way at the end have `grace` seconds. A second signal ends the process at once.
    """
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with theirs, listener:
        process = _spawned(target, settings, theirs, listener)
    # From here on, only that process has its end of the pair, and the socket: both close when it ends.
    try:
        with _signals_sent(link, grace):
            sys.setswitchinterval(_SWITCH_SECONDS)
            _wait_until_ready(Backend(engine, link), process)
            if process.is_alive():
                started()
            while process.is_alive():
                process.join(_JOIN_SECONDS)
    finally:
        link.close()
    if process.exitcode:
        raise PenstockError(f"the process of HTTP has ended with status {process.exitcode}")


def _spawned(
    target: Target, settings: Settings, connected: socket.socket, listener: socket.socket
) -> BaseProcess:
    # Not forked: a driver's threads and locks do not survive that.
    process = multiprocessing.get_context("spawn").Process(
        target=front.serve, args=(target, settings, connected, listener), name="penstock http", daemon=True
    )
    if not hasattr(signal, "pthread_sigmask"):
        process.start()
        return process
    # A process inherits which signals are blocked: so Ctrl-C does not end it before it ignores that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


@contextmanager
def _signals_sent(link: Link, grace: float) -> Iterator[None]:
    """Inside, the first signal asks the process of HTTP to end, and a second ends this one at once."""
    arrived = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            os._exit(128 + number)
        arrived = True
        link.send(End(grace))

    before = [signal.signal(number, handle) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _wait_until_ready(backend: Backend, process: BaseProcess) -> None:
    """Wait for programs and for the process of HTTP, and say how far the programs are."""
    engine = backend.engine
    built, programs = engine.preparing
    with phase(Console(stderr=True), "building programs", programs) if programs else nullcontext() as more:
        while process.is_alive() and not (backend.listening and built >= programs):
            process.join(_LOOK_SECONDS)
            before, built = built, engine.preparing[0]
            if more is not None:
                more(built - before)
            if engine.failure is not None:
                built = programs
