"""The application: OpenAI's endpoints, health, metrics and the chat page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serving import chat, completions, page
from penstock.serving.endpoint import Endpoint
from penstock.serving.errors import SERVER_FAILED, ApiError, json_response
from penstock.serving.generation import engine_failed
from penstock.serving.guarding import Guard
from penstock.serving.metrics import CONTENT_TYPE
from penstock.serving.parameters import no_model
from penstock.serving.service import Service


def application(service: Service) -> Starlette:
    """The ASGI application over a service."""
    simple = _Simple(service)
    texts = Endpoint(service, completions.asked, completions.Texts(service.target.tokenizer))
    messages = Endpoint(service, chat.asked, chat.Messages(service.target.tokenizer))
    routes = [
        Route("/", simple.page),
        Route("/health", simple.health),
        Route("/metrics", simple.metrics),
        Route("/v1/models", simple.models),
        Route("/v1/models/{name:path}", simple.model),
        Route("/v1/completions", texts, methods=["POST"]),
        Route("/v1/chat/completions", messages, methods=["POST"]),
    ]
    settings = service.settings
    paths = tuple(route.path for route in routes if "{" not in route.path)
    guard = Middleware(Guard, key=settings.key, local=settings.local, paths=paths, metrics=service.metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    handlers: dict[Any, Any] = {HTTPException: _no_page, Exception: _failed}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)


class _Simple:
    """The endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = page.response(
            service.settings.name, chat.has_chat(service.target.tokenizer), bool(service.settings.key)
        )

    async def page(self, request: Request) -> Response:
        return self._page

    async def health(self, request: Request) -> Response:
        seen = await self._service.look()
        if seen.failed:
            raise engine_failed(503)
        built, programs = seen.preparing
        if built < programs:
            return json_response({"status": "starting", "programs": {"built": built, "all": programs}}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = self._service.metrics.text((await self._service.look()).stats)
        return Response(text, media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def model(self, request: Request) -> Response:
        name = self._service.settings.name
        if request.path_params["name"] != name:
            raise no_model(request.path_params["name"], name)
        return json_response(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self._service.settings.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "penstock",
            "max_model_len": self._service.target.context,
        }


async def _no_page(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses itself: paths and methods that there are not."""
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _failed(request: Request, error: Exception) -> Response:
    """What nobody expected; uvicorn writes its traceback to the log."""
    return ApiError(500, SERVER_FAILED).response()
