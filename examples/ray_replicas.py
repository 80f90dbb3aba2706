"""Several `colossax serve` behind Ray Serve, on one machine or many: the router is Ray's.

Usage: python examples/ray_replicas.py REPLICAS GPUS_OF_EACH PORT CHECKPOINT [options of serve]
It needs `pip install 'colossax[ray]'`. With RAY_ADDRESS=auto it joins the Ray that runs.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys

import httpx
from ray import serve
from starlette import requests, responses

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(max_ongoing_requests=256, graceful_shutdown_timeout_s=60)
class Replica:
    async def __init__(self, words: list[str]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = ["-m", "colossax", "serve", *words, f"--port={port}"]
        self.server = subprocess.Popen([sys.executable, *own])
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)
        while not await self.answers("/ready"):  # until then Ray sends nothing here
            assert self.server.poll() is None, "colossax serve ended; Ray's log has its words"
            await asyncio.sleep(0.2)

    async def answers(self, path: str):
        with contextlib.suppress(httpx.HTTPError):
            return (await self.client.get(path)).is_success

    async def check_health(self):
        assert await self.answers("/health")  # else Ray starts another replica

    async def __call__(self, request: requests.Request) -> responses.Response:
        given = {"params": request.query_params, "content": await request.body()}
        given["headers"] = {k: v for k, v in request.headers.items() if k not in HOP}
        asked = self.client.build_request(request.method, request.url.path, **given)
        said = await self.client.send(asked, stream=True)
        kept = {k: v for k, v in said.headers.items() if k not in HOP}
        return responses.StreamingResponse(said.aiter_raw(), said.status_code, kept)

    def __del__(self):
        self.server.terminate()  # it drains


if __name__ == "__main__":
    replicas, gpus, port, *words = sys.argv[1:]
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    each = {"num_replicas": int(replicas), "ray_actor_options": {"num_gpus": float(gpus)}}
    serve.run(Replica.options(**each).bind(words))
    print(f"{replicas} replicas on http://127.0.0.1:{port}/v1", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: serve.shutdown() or sys.exit())
    signal.pause()
