"""A server process: a socket, uvicorn, and how it comes to an end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from ipaddress import ip_address
from types import FrameType

import uvicorn
from rich.console import Console

from penstock.errors import SettingError
from penstock.serving.app import application
from penstock.serving.service import Service
from penstock.terminal import phase

_AFTER_GRACE = 5  # seconds to tell clients that their answers were cancelled
_KEEP_ALIVE = 75  # seconds that an idle connection stays open
_LOOK_SECONDS = 0.05  # between two looks at what the engine has built
_SWITCH_SECONDS = 0.0005  # after which the engine's thread may run; by default, ten times as long


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


def run(service: Service, listener: socket.socket, grace: float, started: Callable[[], None]) -> None:
    """Answer requests until the process is told to end by SIGINT or SIGTERM.

    `started` is called when the engine has built its programs; requests before that wait. Answers that are on
    their way at the end have `grace` seconds. A second signal ends the process at once.
    """
    config = uvicorn.Config(
        application(service),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(grace) + _AFTER_GRACE,
    )
    sys.setswitchinterval(_SWITCH_SECONDS)
    _Server(config, service, grace, started).run([listener])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, service: Service, grace: float, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._grace, self._started = service, grace, started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._starting = asyncio.create_task(self._until_ready())

    async def _until_ready(self) -> None:
        engine = self._service.engine
        built, programs = engine.preparing
        with (
            phase(Console(stderr=True), "building programs", programs) if programs else nullcontext() as more
        ):
            while built < programs and engine.failure is None:
                await asyncio.sleep(_LOOK_SECONDS)
                before, built = built, engine.preparing[0]
                if more is not None:
                    more(built - before)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, self._service.cancel_all)
        await super().shutdown(sockets)
        timer.cancel()
