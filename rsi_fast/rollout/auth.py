"""ASGI middleware for vLLM: every path but /health takes the key. vLLM's own guards only /v1, and not the paths that
pause it or change its weights."""

import hmac
import os

OPEN_PATHS = ("/health",)


class RequireKey:
    def __init__(self, app):
        self.app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the Authorization header lacks the server's key"})
