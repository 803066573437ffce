"""An endpoint that generates: from the body of a request to its answer, as a whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from penstock.serving.answers import DONE, Answer, Shape
from penstock.serving.errors import ApiError, as_json, json_response, refused
from penstock.serving.fields import parsed
from penstock.serving.generation import Generation
from penstock.serving.guarding import FAILED
from penstock.serving.parameters import Asked, Target
from penstock.serving.service import Service

_BODY_SECONDS = 30  # for a client to send its request
_LONG_BODY = 16 << 10  # bytes from which on another thread tokenizes
_STREAMED = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # by proxies, which would hold events back
]

Asking = Callable[[Target, Any], Asked]


class Endpoint:
    """Answers requests; `asking` says what a body asks for, and `shape` how the answer looks."""

    def __init__(self, service: Service, asking: Asking, shape: Shape) -> None:
        self._service, self._asking, self._shape = service, asking, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. A client that leaves cancels it."""
        with self._service.admitted():
            body = await _body(Headers(scope=scope), receive, self._service.settings.request_bytes)
            asked = await self._asked(body)
            with self._service.generation(asked) as generation:
                answer = Answer(self._shape, self._service.settings.name, asked, generation)
                async with _watched(receive, generation):
                    if asked.parameters.stream:
                        await _stream(answer, scope, send)
                    else:
                        await json_response(await answer.whole())(scope, receive, send)

    async def _asked(self, body: bytes) -> Asked:
        def read() -> Asked:
            return self._asking(self._service.target, parsed(body))

        asked = await asyncio.to_thread(read) if len(body) > _LONG_BODY else read()
        count, most = len(asked.prompts) * asked.parameters.n, self._service.settings.choices
        if count > most:
            raise refused(f"a request has at most {most} choices in all, and {count} were asked for", "n")
        return asked


async def _stream(answer: Answer, scope: Scope, send: Send) -> None:
    events = answer.events()
    text = await anext(events)  # an error before it is no stream
    await send({"type": "http.response.start", "status": 200, "headers": _STREAMED})
    try:
        while True:
            last = text.endswith(DONE)
            await send({"type": "http.response.body", "body": text.encode(), "more_body": not last})
            if last:
                return
            text = await anext(events)
    except ApiError as error:
        scope[FAILED] = error.status
        event = f"data: {as_json(error.tree)}\n\n"
        await send({"type": "http.response.body", "body": event.encode()})


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation when the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.fail(_left())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def _body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The body of a request, which is not kept when it is too large."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page elsewhere could send other types without asking the server first.
        raise ApiError(415, "the body is JSON: say `Content-Type: application/json`")
    if int(headers.get("content-length", "0")) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _left()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {_BODY_SECONDS} s") from None
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"a request has at most {limit:,} bytes", code="request_too_large")


def _left() -> ApiError:
    return ApiError(499, "the client has left")
