"""A server under load: nothing is lost, all pages are free after it, and memory does not grow."""

import asyncio
import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from colossax.serve import Limits, ServeOptions
from colossax.serve.engine.supervisor import Supervisor
from colossax.serve.measuring import Asked, Load, measured, requests_of
from tests.serve.fake import TOKENIZER, alone
from tests.serve.site import running

pytestmark = pytest.mark.sweep

REQUESTS, CANCELLED, SLOW, MALFORMED, IDLE = 2000, 0.1, 200, 50, 10_000
GROWTH = 1.25
"""Of the resident memory of server and engine between a tenth of the load and its end."""


@contextlib.contextmanager
def served(tmp_path, step_s=0.0, **options):
    mark = str(tmp_path / "mark")
    command = [sys.executable, "-m", "tests.serve.engine.toy", "none", str(step_s), mark]
    backend = Supervisor(command)
    limits = Limits(queue=10 * REQUESTS)
    with running(backend, ServeOptions(port=0, drain_s=5.0, limits=limits, **options)) as server:
        deadline = time.monotonic() + 30
        while not backend.ready():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server, backend


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def slow(port, number):
    """Reads a line now and then, and leaves before the end."""
    body = json.dumps(
        {"model": "toy", "prompt": [30 + number % 9, 4], "max_tokens": 200, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    for _ in range(10):
        if not await reader.readline():
            break
        await asyncio.sleep(0.1)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


BODIES = (b"", b"{", b"[]", b'{"model": 3}', b'{"model": "toy"}', b'{"model": "toy", "x": 1}')


async def malformed(url, number):
    async with httpx.AsyncClient(trust_env=False) as client:
        body = BODIES[number % len(BODIES)]
        answer = await client.post(f"{url}/v1/completions", content=body, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_two_thousand_requests(tmp_path):
    noise = random.Random(1)
    load = Load(requests=REQUESTS, rate=150.0, longest=60, cancelled=CANCELLED, seed=3)
    with served(tmp_path) as (server, backend):
        memory = []

        async def watch():
            while True:
                await asyncio.sleep(1.0)
                memory.append(resident_bytes(backend.pid) + resident_bytes("self"))

        async def others():
            await asyncio.sleep(noise.uniform(0, 1))
            each = [slow(server.port, i) for i in range(SLOW)]
            each += [malformed(server.url, i) for i in range(MALFORMED)]
            noise.shuffle(each)

            async def later(one):
                await asyncio.sleep(noise.uniform(0, 10))
                await one

            await asyncio.gather(*(later(one) for one in each))

        async def all_of_it():
            watching = asyncio.create_task(watch())
            found, _ = await asyncio.gather(measured(server.url, load), others())
            watching.cancel()
            return found

        asked = asyncio.run(all_of_it())
        deadline = time.monotonic() + 20
        while not backend.stats().idle or backend.stats().pages_used:
            assert time.monotonic() < deadline, backend.stats()
            time.sleep(0.1)
        stats = backend.stats()
    assert {one.problem or one.status for one in asked} == {200}
    for one in asked:
        if one.gives_up is None:
            assert one.tokens == said(one)
    assert stats.seats_used == stats.waiting == stats.pages_used == 0
    assert max(memory[-3:]) < GROWTH * memory[len(memory) // 10 + 1]


def said(one: Asked) -> int:
    """Tokens that the toy model says of it, the end left out."""
    from colossax.scheduling import EngineRequest

    request = EngineRequest(prompt=tuple(one.prompt), max_tokens=one.said, ends=(TOKENIZER.eos,))
    return len(alone(request)[0])


def test_idle_connections_are_held(tmp_path):
    """Ten thousand that say nothing, and one that asks is answered; server and test apart."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], IDLE + 1000), before[1]))
    command = [sys.executable, "-m", "tests.serve.engine.standing", str(tmp_path / "mark")]
    held = []
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                port = int(process.stdout.readline())
                for _ in range(IDLE):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                body = {"model": "toy", "prompt": [30, 31], "max_tokens": 5}
                url = f"http://127.0.0.1:{port}/v1/completions"
                assert httpx.post(url, json=body, trust_env=False).status_code == 200
                assert not any(map(closed, held[:: IDLE // 100]))
            finally:
                process.terminate()
            assert process.wait(30) == 0
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def closed(sock):
    """Whether the other end has closed it."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


def test_requests_are_drawn_alike():
    """The load of this test has what it says."""
    found = requests_of(Load(requests=REQUESTS, cancelled=CANCELLED, seed=3), list(range(30)))
    assert abs(sum(one.gives_up is not None for one in found) - REQUESTS * CANCELLED) < 60
