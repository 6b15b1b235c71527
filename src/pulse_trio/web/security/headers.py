"""The headers of every answer: what a browser may load, frame and keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-frame-options": b"DENY",
    b"x-content-type-options": b"nosniff",
    # Not no-referrer: browsers then send Origin: null with our own forms.
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    b"x-robots-tag": b"noindex, nofollow",
}
NO_STORE = b"no-store"


class SecurityHeaders:
    """Outermost: refusals and errors have the headers too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers, in place of any that the page has set; caching is allowed for static files alone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_static = route_of(scope).startswith("/static/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in HEADERS]
                if not is_static or message["status"] >= 300:
                    kept = [(name, value) for name, value in kept if name.lower() != b"cache-control"]
                    kept.append((b"cache-control", NO_STORE))
                message = {**message, "headers": [*kept, *HEADERS.items()]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def route_of(scope: Scope) -> str:
    """The path within the app, whatever prefix it is mounted under."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith((f"{root}/",)) else "/" if path == root else path
