"""The process of HTTP: uvicorn over a socket, and how it comes to an end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn

from penstock.serving.app import application
from penstock.serving.link import Listening
from penstock.serving.parameters import Target
from penstock.serving.service import Service, Settings

_AFTER_GRACE = 5  # seconds to tell clients that their answers were cancelled
_KEEP_ALIVE = 75  # seconds that an idle connection stays open


def serve(target: Target, settings: Settings, connected: socket.socket, listener: socket.socket) -> None:
    """Answer requests until the process of the engine says that it is enough, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process takes them
        signal.signal(number, signal.SIG_IGN)
    service = Service(target, settings, connected)
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
    )
    service.on_loss = lambda: os._exit(1)  # nobody can answer: clients should notice at once
    _Server(config, service).run([listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._grace = service, 0.0
        service.on_end = self._end

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def _end(self, grace: float) -> None:
        self._grace, self.should_exit = grace, True
        self.config.timeout_graceful_shutdown = int(grace) + _AFTER_GRACE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._service.send(Listening())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, self._service.cancel_all)
        await super().shutdown(sockets)
        timer.cancel()
