"""What every request passes first: who may ask, and a count of how requests ended."""

from __future__ import annotations

import hmac
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serving.errors import ApiError
from penstock.serving.metrics import Metrics

OPEN = ("/", "/health")  # need no key: they tell nothing, and a page has to ask for the key
FAILED = "penstock.status"  # in the scope: the status of a stream that failed after it had begun


class Guard:
    """Checks the key, and the name that the server is asked by.

    Without a key, a server that only this machine can reach answers only to names of this machine: a web
    page elsewhere could give its own name the address 127.0.0.1, and then read what is answered.
    """

    def __init__(
        self, app: ASGIApp, *, key: str, local: bool, paths: tuple[str, ...], metrics: Metrics
    ) -> None:
        self._app, self._key, self._local = app, key.encode(), local
        self._paths, self._metrics = paths, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, noted)
        except ApiError as error:
            await error.response()(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests[path, scope.get(FAILED, status)] += 1

    def _check(self, path: str, headers: Headers) -> None:
        if self._local and not self._key and not _is_local(headers.get("host", "")):
            raise ApiError(403, "without an API key, this server answers to localhost and to addresses alone")
        if self._key and path not in OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self._key)
            if scheme.lower() != "bearer" or not right:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; it is given as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )


def _is_local(host: str) -> bool:
    """Whether a Host header is an address, or localhost."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
