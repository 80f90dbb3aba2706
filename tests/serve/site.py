"""A server to ask: in this process without sockets, or at a port of its own in a thread."""

import asyncio
import contextlib
import json
import threading
import time

import httpx

from colossax.serve import ServeOptions, bound
from colossax.serve.http.app import Api
from colossax.serve.http.server import Draining


class Site:
    """The application, asked without sockets; one event loop for all of its life."""

    def __init__(self, make_engine, options=None):
        self._runner = asyncio.Runner()
        self.engine = make_engine()
        self.api = Api(self.engine, options or ServeOptions())

    def ask(self, path, body=None, *, method=None, headers=None, content=None):
        """One answer; a body is sent as JSON."""
        return self._runner.run(self.asked(path, body, method, headers, content))

    async def asked(self, path, body=None, method=None, headers=None, content=None):
        transport = httpx.ASGITransport(app=self.api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            sent = content if body is None else json.dumps(body).encode()
            method = method or ("GET" if sent is None else "POST")
            return await client.request(method, path, content=sent, headers=headers)

    def run(self, work):
        return self._runner.run(work)

    def close(self):
        self.api._preparer.close()
        self._runner.run(self.engine.close())
        self._runner.close()


@contextlib.contextmanager
def site(make_engine, options=None):
    """A `Site` that is closed."""
    found = Site(make_engine, options)
    try:
        yield found
    finally:
        found.close()


class Running:
    """A real server."""

    def __init__(self, engine, options):
        self.engine, self.api = engine, Api(engine, options)
        self._sock = bound(options)
        self.port = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Draining(self.api, options)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        self.server.run(sockets=[self._sock])


@contextlib.contextmanager
def running(engine, options=None):
    """A server in a thread; it is told to end, and has to."""
    one = Running(engine, options or ServeOptions(port=0, drain_s=5.0))
    one.thread.start()
    try:
        until(lambda: one.server.started)
        yield one
    finally:
        one.server.drain()
        one.server.drain()
        one.thread.join(20)
        assert not one.thread.is_alive()


def until(what, seconds=30):
    """Wait for something to be true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def events(text):
    """The values of a stream of events, the last of which says that it is whole."""
    parts = text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def error_of(response, status):
    """The error of an answer, which has to be in the documented form."""
    assert response.status_code == status, response.text
    value = response.json()
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and 'File "' not in response.text
    return value["error"]
