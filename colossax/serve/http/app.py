"""The routes: who may ask what, and who answers."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from colossax.serve.backend import Backend
from colossax.serve.http import answers, fields
from colossax.serve.http.continuing import Continuer
from colossax.serve.http.embedding import Embedding
from colossax.serve.http.errors import Refusal, bad, internal, no_model, unavailable
from colossax.serve.http.keys import Keys
from colossax.serve.http.limits import Buckets, Doors, body_of
from colossax.serve.http.metrics import CONTENT_TYPE, Counted, Metrics
from colossax.serve.http.preparing import Preparer, check_running
from colossax.serve.http.reading import members
from colossax.serve.options import ServeOptions
from colossax.serve.page.routes import mount

Handler = Callable[[Request], Awaitable[Response]]

_LOG = logging.getLogger("colossax.serve")

ENDPOINTS = frozenset(
    {
        "/",
        "/stats",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/metrics",
        "/health",
        "/ready",
    }
)


class Api:
    """The endpoints of one server.

    Args:
        backend: The engine behind them.
        options: Limits and keys.

    Attributes:
        app: The application, for an ASGI server.
        doors: Who is inside; closed to end.
        failure: What the backend raised when it was started; None: nothing.
        stats: Tells how the engine is.
    """

    def __init__(self, backend: Backend, options: ServeOptions) -> None:
        self._backend, self._options = backend, options
        self.stats = backend.stats
        limits, facts = options.limits, backend.facts
        self.doors = Doors(facts.seats + limits.queue)
        self.failure: Exception | None = None
        self._keys, self._buckets = (
            Keys.of_file(options.api_key_file),
            Buckets(limits.rate, limits.burst),
        )
        self._metrics = Metrics(backend, self.doors)
        self._preparer = Preparer(backend, limits)
        self._continuer = Continuer(backend, self._preparer, self.doors, self._metrics, limits)
        self._embedding = Embedding(
            backend, self._preparer, self.doors, self._metrics.prompt_tokens.inc, limits
        )
        self._created = int(time.time())
        self.app = self._built()

    def _built(self) -> FastAPI:
        app = FastAPI(
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
            lifespan=self._life,
        )
        open_to_all = {"/health": self._health, "/ready": self._ready, "/metrics": self._counts}
        for path, handler in open_to_all.items():
            app.add_route(path, handler, ["GET"])
        app.add_route("/v1/models", self._guarded(self._models), ["GET"])
        app.add_route("/v1/models/{name:path}", self._guarded(self._model), ["GET"])
        asked = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
        }
        for path, handler in asked.items():
            app.add_route(path, self._guarded(handler), ["POST"])
        mount(app, self._backend, self.doors, self._metrics.records, self._keys)
        app.add_exception_handler(Refusal, _refused)
        app.add_exception_handler(HTTPException, _no_route)
        app.add_exception_handler(Exception, _failed)
        if self._options.cors:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=list(self._options.cors),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
            )
        app.add_middleware(Counted, metrics=self._metrics, endpoints=ENDPOINTS)
        return app

    @contextlib.asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncGenerator[None, None]:
        try:
            await self._backend.start()
        except Exception as problem:
            self.failure = problem
            raise
        try:
            yield
        finally:
            self._preparer.close()
            await self._backend.close()

    def _guarded(self, handler: Handler) -> Handler:
        """A handler for those who may ask."""

        async def guarded(request: Request) -> Response:
            who = self._keys.check(request.headers.get("authorization"))
            address = request.client.host if request.client else ""
            with self.doors.handling():
                self._buckets.take(who or address)
                return await handler(request)

        return guarded

    async def _completions(self, request: Request) -> Response:
        ask = fields.completion(await body_of(request, self._options.limits))
        check_running(self._backend)
        return await self._continuer.answer(request, ask)

    async def _chat(self, request: Request) -> Response:
        ask = fields.chat(await body_of(request, self._options.limits))
        check_running(self._backend)
        return await self._continuer.answer(request, ask)

    async def _embeddings(self, request: Request) -> Response:
        return await self._embedding.answer(request)

    async def _tokenize(self, request: Request) -> Response:
        body = fields.json_of(await body_of(request, self._options.limits))
        found = members(body, "", fields.TOKENIZE)
        self._preparer.adapter(found.get("model", self._backend.facts.model))
        if ("prompt" in found) == ("messages" in found):
            raise bad("prompt: give either it or messages", "prompt")
        if "tools" in found and "messages" not in found:
            raise bad("tools: are told beside messages; give those too", "tools")
        if "messages" in found:
            tools = found.get("tools", ())
            tokens = await self._preparer.chat_tokens(found["messages"], tools)
        elif found["prompt"]:
            (tokens,) = await self._preparer.prompt_tokens((found["prompt"],), "prompt")
        else:
            tokens = []
        slots = self._backend.facts.slots
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": slots})

    async def _models(self, request: Request) -> Response:
        return JSONResponse(answers.models(self._backend.facts.names, self._created))

    async def _model(self, request: Request) -> Response:
        name, known = request.path_params["name"], self._backend.facts.names
        if name not in known:
            raise no_model(name, known)
        return JSONResponse(answers.model(name, self._created))

    async def _health(self, request: Request) -> Response:
        found, most = self._backend.stats(), self._options.health_s
        if found.failed:
            raise unavailable(found.failed, "unhealthy")
        if not found.idle and found.since_step_s > most:
            raise unavailable(
                f"the engine has ended no step for {found.since_step_s:.0f} s", "unhealthy"
            )
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self.doors.check_open()
        check_running(self._backend)
        return JSONResponse({"status": "ready"})

    async def _counts(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return refusal.response()


async def _no_route(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    path, method = request.url.path[:200], request.method[:20]
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        message = f"{path} does not take {method}; it takes {allowed}"
        return Refusal(
            405, message, code="method_not_allowed", headers=dict(problem.headers or {})
        ).response()
    if problem.status_code == 404:
        known = ", ".join(sorted(ENDPOINTS))
        return Refusal(404, f"{path} is not here; known: {known}", code="not_found").response()
    return Refusal(problem.status_code, str(problem.detail)).response()


async def _failed(request: Request, problem: Exception) -> Response:
    _LOG.error("%s failed", request.url.path, exc_info=problem)
    return internal().response()
