"""Errors as OpenAI's interface has them: a status, and a JSON object that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

SERVER_FAILED = "the server has failed on this request; its log says why"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request is refused, or failed; `param` is the key of the request that is to blame, if it is a key."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def tree(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        return json_response(self.tree, self.status, self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that asks for what is not possible."""
    return ApiError(400, message, param=param, code=code)


def json_response(tree: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON. It is ASCII: what a client sent may hold half of a surrogate pair."""
    return Response(as_json(tree), status, headers, "application/json")


def as_json(tree: Any) -> str:
    """A value in JSON, on one line."""
    return json.dumps(tree, separators=(",", ":"))
