"""Several `colossax serve` behind Ray Serve, on one machine or many: the router is Ray's.

Usage: python examples/ray_replicas.py [--replicas 2] [--gpus 0] [--port 8000] CHECKPOINT [options
of colossax serve]. It needs `pip install 'colossax[ray]'` and a checkpoint that all machines see;
with RAY_ADDRESS=auto it joins the Ray that runs (`ray start`), else it starts one.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(max_ongoing_requests=256, graceful_shutdown_timeout_s=60)
class Replica:
    """A server of its own, asked over the loopback of its machine."""

    async def __init__(self, words: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "colossax", "serve", *words, "--host=127.0.0.1"]
        self.server = subprocess.Popen([*command, f"--port={port}"])
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)
        while not await self._is("/ready"):  # until then Ray sends nothing here
            if self.server.poll() is not None:
                raise RuntimeError("colossax serve ended; its words are in this replica's log")
            await asyncio.sleep(0.2)

    async def _is(self, path: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self.client.get(path)).is_success
        return False

    async def check_health(self) -> None:
        if not await self._is("/health"):
            raise RuntimeError("colossax serve is not well")  # Ray starts another replica

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = [(k, v) for k, v in request.headers.items() if k not in HOP]
        asked = self.client.build_request(
            request.method,
            request.url.path,
            params=request.query_params.multi_items(),
            headers=headers,
            content=await request.body(),
        )
        found = await self.client.send(asked, stream=True)
        kept = {k: v for k, v in found.headers.items() if k not in HOP}
        return StreamingResponse(self._pieces(found), found.status_code, kept)

    async def _pieces(self, found: httpx.Response) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(found):  # whoever hangs up is hung up on
            async for piece in found.aiter_raw():
                yield piece

    def __del__(self) -> None:
        self.server.terminate()  # it drains
        self.server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--port", type=int, default=8000)
    given, words = parser.parse_known_args()
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    wanted = {"num_replicas": given.replicas, "ray_actor_options": {"num_gpus": given.gpus}}
    serve.run(Replica.options(**wanted).bind(words), route_prefix="/")
    print(f"{given.replicas} replicas on http://127.0.0.1:{given.port}/v1", flush=True)
    ended = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()


if __name__ == "__main__":
    main()
