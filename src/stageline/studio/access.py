"""Refuse requests that do not come from the studio's own pages.

    Host is a name of this machine? ─► Origin is the studio? ─► path begins with the token? ─► app

Other users of the machine can connect to its loopback interface, and so can any web page that is
open in the browser. The token keeps the first out; the checks of Host (against DNS rebinding) and
Origin (against requests from other pages) the second. Any port is accepted in Host, since a tunnel
such as `ssh -L 9000:127.0.0.1:8000` changes it.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_SITE = ("same-origin", "none")  # Sec-Fetch-Site: a studio page, or an address typed by the user
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
}


class AccessGuard:
    """An ASGI application around another, which only sees requests with the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = refusal_of(Headers(scope=scope)) or self._token_refusal(scope["path"])
        if refusal:
            response = PlainTextResponse(refusal + "\n", status_code=403)
            await response(scope, receive, send_with_headers)
        else:
            inner = {**scope, "root_path": f"/{self.token}"}
            await self.app(inner, receive, send_with_headers)

    def _token_refusal(self, path: str) -> str:
        given = path.removeprefix("/").partition("/")[0]
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return ""
        return "the token is missing or wrong: use the address that stageline studio has printed"


def refusal_of(headers: Headers) -> str:
    """Return why a request with these headers is refused; '' if it is not."""
    host = headers.get("host", "")
    if _name_of(f"//{host}") not in LOOPBACK:
        return "the host is not a name of this machine: use 127.0.0.1 or localhost"
    if set(headers.getlist("origin")) - {f"http://{host}"}:
        return "the request comes from another site"
    if headers.get("sec-fetch-site", "none") not in OWN_SITE:
        return "the request comes from another site"
    return ""


def _name_of(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    has_more = parts.username is not None or parts.path or parts.query or parts.fragment
    return None if has_more else parts.hostname
