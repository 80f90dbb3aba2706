"""The page, its files, and the numbers that it shows."""

import hashlib
import importlib.resources
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from colossax.serve.backend import Backend
from colossax.serve.http.keys import Keys
from colossax.serve.http.limits import Doors
from colossax.serve.http.records import Records

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Of files by the ends of their names; no other file of the folder is shown."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing from elsewhere, nothing inline, and in nobody's frame."""

GUARDS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def mount(app: Starlette, backend: Backend, doors: Doors, records: Records, keys: Keys) -> None:
    """Add `/`, the files that it names, and `/stats`.

    The files hold nothing of the model or its requests, so anyone may read them; `/stats` needs a
    key where there are keys, and does not count towards a caller's rate.
    """
    for name, (kind, body) in files().items():
        path = "/" if name == "index.html" else f"/page/{name}"
        app.add_route(path, _file(kind, body), ["GET"])

    async def stats(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        return JSONResponse(numbers(backend, doors, records), headers={"Cache-Control": "no-store"})

    app.add_route("/stats", stats, ["GET"])


def files() -> dict[str, tuple[str, bytes]]:
    """Kind and content of each file by its name."""
    folder = importlib.resources.files("colossax.serve.page")
    found = {}
    for file in folder.iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = (kind, file.read_bytes())
    return found


def _file(kind: str, body: bytes) -> Callable[[Request], Awaitable[Response]]:
    """Answers with a file, or says that the one a browser has is still it."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = GUARDS | {"Cache-Control": "no-cache", "ETag": tag}

    async def file(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").split(",")
        if tag in {one.strip().removeprefix("W/") for one in known}:
            return Response(None, 304, headers)
        return Response(body, 200, headers, kind)

    return file


def numbers(backend: Backend, doors: Doors, records: Records) -> dict[str, Any]:
    """How server and engine are: what `/stats` answers."""
    facts, found = backend.facts, backend.stats()
    return {
        "model": facts.model,
        "models": list(facts.names),
        "chat": facts.chat_template is not None,
        "slots": facts.slots,
        "ready": backend.ready(),
        "draining": doors.draining,
        "inside": doors.inside,
        "seats": facts.seats,
        "seats_used": found.seats_used,
        "waiting": found.waiting,
        "pages": {
            "free": found.pages_free,
            "used": found.pages_used,
            "cached": found.pages_cached,
        },
        "prefix_hit_tokens": found.prefix_hit_tokens,
        "preemptions": found.preemptions,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "since_step_s": round(found.since_step_s, 3),
    } | records.told()
