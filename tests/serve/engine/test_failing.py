"""Engines that serve nobody, their last words, and a disk that is slow."""

import asyncio
import json
import socket

import pytest

from colossax.scheduling import Emitted
from colossax.serve import EngineDown
from colossax.serve.engine import patience, supervisor
from colossax.serve.engine.handing import DEATHS_ALONE, QUIET_DEATHS
from colossax.serve.engine.journal import Journal, unfinished
from colossax.serve.engine.line import Line
from colossax.serve.engine.patience import DEATHS, STARTS, STEADY_S, Patience
from colossax.serve.engine.wire import packed
from tests.serve.engine.test_supervisor import expected, heard, request, served
from tests.serve.engine.test_supervisor import supervisor as started

pytestmark = pytest.mark.slow


@pytest.mark.catches("engine-is-tried-for-ever")
@pytest.mark.catches("last-words-are-kept")
def test_an_engine_that_fails_at_each_start_is_given_up(tmp_path, monkeypatch):
    """All hear of it, with what it said last, and nobody is taken any more."""
    lines = []
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.01)
    monkeypatch.setattr(patience, "STARTS", 2)

    async def work(backend):
        one = await backend.submit(request(1))
        said = [x async for x in one.said]
        with pytest.raises(EngineDown):
            await backend.submit(request(2))
        return said, backend.stats().failed, backend.ready()

    said, failed, ready = served(started(tmp_path, "dying", tell=lines.append), work)
    assert failed == (
        "the engine ended 2 times in a row before it said a token, at last with exit code 1; its"
        " last words: MemoryError: no room"
    )
    assert said == [Emitted(0, ended="error", message=failed)] and not ready
    assert lines[-1] == failed and sum("started again" in line for line in lines) == 1


@pytest.mark.catches("patience-of-blamed-engines")
def test_who_is_patient_with_whom():
    fails = {"blamed": False, "ready_s": 0.0}
    one = Patience()
    assert [one.died(**fails) for _ in range(STARTS)] == [False] * (STARTS - 1) + [True]
    for heals in (Patience.served, lambda it: it.died(blamed=False, ready_s=STEADY_S)):
        one = Patience()
        assert not any(one.died(**fails) for _ in range(STARTS - 1))
        heals(one)
        assert not one.died(**fails)
    # Four requests, each of which kills whoever runs it, are found before this ends.
    blamed, one = {"blamed": True, "ready_s": 1.0}, Patience()
    assert QUIET_DEATHS + 4 * DEATHS_ALONE < DEATHS
    assert [one.died(**blamed) for _ in range(DEATHS)] == [False] * (DEATHS - 1) + [True]


@pytest.mark.catches("last-words-are-lost")
def test_last_words_are_heard_though_nobody_can_be_written_to():
    async def work():
        ours, theirs = socket.socketpair()
        line = Line(ours)
        await line.open()
        words = [{"say": "began", "ids": [number]} for number in range(3)]
        theirs.sendall(b"".join(map(packed, words)) + packed({"say": "half"})[:-3])
        theirs.close()  # before the loop has looked
        line.send({"do": "add"})
        found = []
        with pytest.raises(EOFError):
            while True:
                found.append(await line.received())
        found += line.rest()
        line.close()
        return found, words

    found, words = asyncio.run(work())
    assert found == words


@pytest.mark.catches("grammar-kills-and-nobody-is-blamed")
def test_a_grammar_that_kills_the_engine_is_found(tmp_path):
    """While it is compiled, before it has a seat; what is beside it goes on."""
    lines = []

    async def work(backend):
        good = [asyncio.create_task(heard(backend, request(i))) for i in range(3)]
        await asyncio.sleep(0)
        bad = await backend.submit(request(0, waits=True, grammar="poison"))
        good += [asyncio.create_task(heard(backend, request(i))) for i in range(3, 6)]
        return [x async for x in bad.said][-1], await asyncio.gather(*good)

    last, good = served(started(tmp_path, tell=lines.append), work)
    assert last.ended == "error" and "each time that it ran this request" in last.message
    assert good == [expected(request(i)) for i in range(6)]
    assert len([line for line in lines if "SIGKILL" in line]) == QUIET_DEATHS + DEATHS_ALONE


class Held(Journal):
    """One whose disk takes its time."""

    def __init__(self, path):
        super().__init__(path)
        self.begins, self.tells, self.lines = asyncio.Event(), asyncio.Event(), []

    def _write(self, line):
        wanted = self.begins if "begin" in line else self.tells
        asyncio.run_coroutine_threadsafe(wanted.wait(), self.loop).result()
        super()._write(line)
        self.lines.append(json.loads(json.dumps(line)))


@pytest.mark.catches("journal-in-the-loop")
@pytest.mark.catches("engine-before-the-journal")
def test_a_slow_disk_holds_up_nobody_who_has_begun(tmp_path):
    """A request goes to the engine when it is written down; lines are in order."""
    journal, one = Held(tmp_path / "journal"), request(4)

    async def work(backend):
        journal.loop = asyncio.get_running_loop()
        while not backend.ready():
            await asyncio.sleep(0.01)
        gone, here = (asyncio.create_task(backend.submit(one)) for _ in range(2))
        await asyncio.sleep(0.2)
        too_early = here.done() or backend._live
        gone.cancel()
        journal.begins.set()
        assert not too_early
        found = [x async for x in (await here).said]
        journal.tells.set()
        while not journal.lines or 1 not in journal.lines[-1].get("ended", []):
            await asyncio.sleep(0.01)
        return found

    async def let_go(backend):
        try:
            return await work(backend)
        finally:
            journal.begins.set()
            journal.tells.set()

    found = served(started(tmp_path, journal=journal), let_go)
    tokens = [x.token for x in found if x.token is not None]
    assert tokens == expected(one)[0]
    assert [line["begin"] for line in journal.lines if "begin" in line] == [0, 1]
    ended = [number for line in journal.lines for number in line.get("ended", ())]
    said = [token for line in journal.lines for token in line.get("said", {}).get("1", [])]
    assert sorted(ended) == [0, 1] and said == tokens
    assert unfinished(journal.path) == 0 and not journal.path.exists()
