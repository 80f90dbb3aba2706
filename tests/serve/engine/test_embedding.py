"""Embeddings over an engine's deaths: each text has the vector that it has undisturbed."""

import asyncio
import os
import random
import signal
import sys

import pytest

from colossax.errors import InputError
from colossax.serve import EngineFailed
from colossax.serve.engine.supervisor import Supervisor
from tests.serve.engine.test_supervisor import served, supervisor
from tests.serve.engine.toy_embedder import vector

pytestmark = pytest.mark.slow


def embedding(fault="none", step_s=0.0, **options):
    command = [sys.executable, "-m", "tests.serve.engine.toy_embedder", fault, str(step_s)]
    return Supervisor(command, **options)


def texts(i):
    return [tuple(20 + (i + j + k) % 200 for k in range(1 + (7 * i + j) % 20)) for j in range(5)]


@pytest.mark.catches("embeddings-not-asked-again")
def test_killed_at_any_moment():
    lines, noise = [], random.Random(1)

    async def work(backend):
        async def kill():
            for _ in range(3):
                await asyncio.sleep(noise.uniform(0.3, 0.8))
                if backend.ready():
                    os.kill(backend.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        found = await asyncio.gather(*(backend.embed(texts(i)) for i in range(12)))
        killing.cancel()
        return found, backend.stats()

    found, _ = served(embedding(step_s=0.1, tell=lines.append), work)
    assert [line for line in lines if "SIGKILL" in line]
    assert found == [[vector(text) for text in texts(i)] for i in range(12)]


def test_what_kills_every_engine_is_given_up():
    async def work(backend):
        good = [asyncio.create_task(backend.embed(texts(i))) for i in range(3)]
        with pytest.raises(EngineFailed, match="each time that it ran this request"):
            await backend.embed([(9, 9)])
        return await asyncio.gather(*good)

    found = served(embedding("poison"), work)
    assert found == [[vector(text) for text in texts(i)] for i in range(3)]


def test_one_text_ends_its_own_request():
    """What is refused, gives no numbers or is given up; nobody else hears of it."""

    async def work(backend):
        good = asyncio.create_task(backend.embed(texts(1)))
        with pytest.raises(EngineFailed, match="text: seven is refused here; leave it out"):
            await backend.embed([(1, 2), (7,)])
        with pytest.raises(EngineFailed, match="it gave none"):
            await backend.embed([(8,), (1, 2)])
        leaving = asyncio.create_task(backend.embed(texts(2)))
        await asyncio.sleep(0.02)
        leaving.cancel()
        assert await good == [vector(text) for text in texts(1)]
        until = asyncio.get_running_loop().time() + 5
        while backend._live:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.01)
        return backend.stats()

    assert served(embedding(step_s=0.05), work).seats_used == 0


def test_an_engine_that_continues_texts_tells_none(tmp_path):
    async def work(backend):
        with pytest.raises(InputError, match="it tells no embeddings; ask for a continuation"):
            await backend.embed([(1,)])

    served(supervisor(tmp_path), work)
