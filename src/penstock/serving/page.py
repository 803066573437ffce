"""The chat page: one file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from starlette.responses import Response


def response(name: str, has_chat: bool, needs_key: bool) -> Response:
    """The page for a model. Only its own style and script run, whatever an answer of the model contains."""
    text = Path(__file__).with_name("page.html").read_text("utf-8")
    (style,), (script,) = (
        re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script")
    )
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    marks = {"{CHAT}": str(has_chat).lower(), "{KEY}": str(needs_key).lower(), "{NAME}": escape(name)}
    for mark, value in marks.items():
        text = text.replace(mark, value)
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
