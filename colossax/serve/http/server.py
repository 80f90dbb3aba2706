"""A server's life: it takes its port, serves, and ends when it is told to without losing anyone."""

import errno
import signal
import socket
import time
from types import FrameType

import uvicorn

from colossax.errors import InputError
from colossax.serve.backend import Backend
from colossax.serve.http.app import Api
from colossax.serve.http.limits import Doors
from colossax.serve.http.protocol import protocol
from colossax.serve.options import ServeOptions

_LAST_S = 5
"""For connections to close once all requests have ended."""

_BACKLOG = 1024


def bound(options: ServeOptions) -> socket.socket:
    """The socket of a server, taken before anything is loaded.

    Raises:
        InputError: The port is in use or may not be taken, or the address is not this machine's.
    """
    where = f"--port: {options.host}:{options.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as problem:
        raise InputError(
            f"--host: {options.host} is no address of this machine ({problem}); give one, such as"
            " 127.0.0.1"
        ) from problem
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as problem:
        sock.close()
        if problem.errno == errno.EADDRINUSE:
            raise InputError(f"{where} is in use; give another port, or 0 for any") from problem
        raise InputError(
            f"{where} cannot be taken ({problem.strerror}); give another host or port"
        ) from problem
    return sock


def serve(backend: Backend, options: ServeOptions, sock: socket.socket | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C, or no engine runs any more, then let those inside finish.

    After the signal new requests are told 503; those that run have `drain_s` to finish, and are
    ended after that, as they are by a second signal.

    Args:
        backend: The engine; it is started and closed here.
        options: Where and how.
        sock: What `bound` took; None: takes it.

    Returns:
        The exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 where the engine failed for good.

    Raises:
        InputError: The port cannot be taken, or keys cannot be read.
    """
    api = Api(backend, options)
    sock = bound(options) if sock is None else sock
    server = Draining(api, options)
    try:
        server.run(sockets=[sock])
    except SystemExit:  # of some versions, where the engine does not start
        if api.failure is None:
            raise
    finally:
        sock.close()
    if api.failure is not None:
        raise api.failure
    if backend.stats().failed:
        return 1
    return 130 if server.wish == signal.SIGINT else 0


class Draining(uvicorn.Server):
    """Ends when nobody is inside any more.

    Args:
        api: What is served.
        options: How.

    Attributes:
        wish: The signal that told it to end; None: none did.
    """

    def __init__(self, api: Api, options: ServeOptions) -> None:
        limits = options.limits
        super().__init__(
            uvicorn.Config(
                api.app,
                loop="asyncio",
                http=protocol(limits.body_s),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # anyone could say any address
                server_header=False,
                h11_max_incomplete_event_size=limits.header_bytes,
                timeout_graceful_shutdown=_LAST_S,
            )
        )
        self._doors: Doors = api.doors
        self._stats = api.stats
        self._drain_s, self._until = options.drain_s, 0.0
        self.wish: int | None = None

    def drain(self) -> None:
        """Let nobody in any more, and end when those inside have left."""
        if not self._doors.draining:
            self._until = time.monotonic() + self._drain_s
            self._doors.draining = True
        else:
            self._until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first is a wish, the second ends those inside."""
        self.wish = sig if self.wish is None else self.wish
        self.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._stats().failed and not self._doors.draining:
            self.drain()
        if self._doors.draining:
            if self._doors.inside and time.monotonic() >= self._until:
                self._doors.over.set()
            self.should_exit = not self._doors.inside or self._doors.over.is_set()
        return await super().on_tick(counter)
