"""Engines die and are started again, and requests say what they would have said."""

import asyncio
import json
import os
import random
import signal
import stat
import sys
from pathlib import Path

import pytest

from colossax.errors import InputError
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.serve import EngineDown
from colossax.serve.engine.handing import DEATHS_ALONE, QUIET_DEATHS, Handing
from colossax.serve.engine.journal import Journal, unfinished
from colossax.serve.engine.supervisor import Supervisor
from tests.serve.fake import GRAMMARS, TOKENIZER, alone

TIMEOUT_S = 20


def supervisor(tmp_path, fault="none", step_s=0.0, **options):
    mark = str(tmp_path / "was here")
    command = [sys.executable, "-m", "tests.serve.engine.toy", fault, str(step_s), mark]
    return Supervisor(command, **options)


def request(i, **more):
    given = {"max_tokens": 60, "ends": (TOKENIZER.eos,), "sampling": SamplingConfig(seed=i)}
    return EngineRequest(**{"prompt": (20 + i, 21, 22), **given, **more})


def expected(asked):
    tokens, how = alone(asked)
    return tokens, how


async def heard(backend, asked):
    started = await backend.submit(asked)
    found = [one async for one in started.said]
    return [one.token for one in found if one.token is not None], found[-1].ended


def served(backend, work):
    """What `work(backend)` gives, between start and close."""

    async def life():
        await backend.start()
        try:
            return await asyncio.wait_for(work(backend), TIMEOUT_S)
        finally:
            await backend.close()

    return asyncio.run(life())


@pytest.mark.catches("restart-forgets-what-was-said")
@pytest.mark.catches("killed-engine-is-not-started")
def test_killed_at_any_moment(tmp_path):
    """Several times while requests run: each says what it says undisturbed, and nothing twice."""
    lines, noise = [], random.Random(0)
    asked = [request(i) for i in range(12)]

    async def work(backend):
        async def kill():
            for _ in range(4):
                await asyncio.sleep(noise.uniform(0.3, 0.8))
                if backend.ready():
                    os.kill(backend.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        found = await asyncio.gather(*(heard(backend, one) for one in asked))
        killing.cancel()
        return found

    found = served(supervisor(tmp_path, step_s=0.02, tell=lines.append), work)
    deaths = [line for line in lines if "SIGKILL" in line]
    assert deaths and "go on" in deaths[0]
    for one, got in zip(asked, found, strict=True):
        assert got == expected(one)


@pytest.mark.catches("hanging-engine-stays")
def test_an_engine_that_hangs_is_ended(tmp_path):
    lines, one = [], request(3)
    backend = supervisor(tmp_path, "hang once", hang_s=1.0, tell=lines.append)
    assert served(backend, lambda b: heard(b, one)) == expected(one)
    assert any("has said nothing for" in line for line in lines)


@pytest.mark.catches("poison-is-tried-for-ever")
def test_what_kills_every_engine_is_given_up(tmp_path):
    """And what was beside it, before and behind it, goes on."""
    lines = []

    async def work(backend):
        good = [asyncio.create_task(heard(backend, request(i))) for i in range(3)]
        await asyncio.sleep(0)
        bad = await backend.submit(request(0, prompt=(9, 9)))
        good += [asyncio.create_task(heard(backend, request(i))) for i in range(3, 9)]
        last = [x async for x in bad.said][-1]
        return last, await asyncio.gather(*good)

    last, good = served(supervisor(tmp_path, "poison", tell=lines.append), work)
    assert last.ended == "error" and "each time that it ran this request" in last.message
    assert good == [expected(request(i)) for i in range(9)]
    deaths = [line for line in lines if "SIGKILL" in line]
    assert len(deaths) == QUIET_DEATHS + DEATHS_ALONE


def test_what_the_engine_refuses(tmp_path):
    with pytest.raises(InputError, match="plan.mesh: there are too few devices; use fewer"):
        supervisor(tmp_path, "refuse")
    with pytest.raises(RuntimeError, match="ended with 1 before it began"):
        supervisor(tmp_path, "mute")

    async def work(backend):
        started = await backend.submit(request(0, prompt=(7,)))
        with pytest.raises(InputError, match="outside the vocabulary"):
            await backend.submit(request(0, prompt=(9999,)))
        return [x async for x in started.said][-1]

    last = served(supervisor(tmp_path), work)
    assert last.ended == "error" and last.message == "prompt: seven is refused here; leave it out"


@pytest.mark.catches("cancel-is-not-sent")
def test_cancelled(tmp_path):
    async def work(backend):
        long = await backend.submit(request(1, max_tokens=200, ends=()))
        said = []
        async for one in long.said:
            said.append(one)
            if len(said) == 5:
                backend.cancel(long.number)
        while not backend.stats().idle:
            await asyncio.sleep(0.01)
        return said, backend.stats()

    said, stats = served(supervisor(tmp_path, step_s=0.01), work)
    assert said[-1].ended == "cancelled" and len(said) < 200
    assert stats.seats_used == stats.pages_used == 0


@pytest.mark.catches("grammar-holds-up-others")
def test_grammars_are_compiled_beside_the_steps(tmp_path):
    """One that takes seconds holds up nobody, is refused alone, and may be cancelled."""
    grammar = GRAMMARS.compiled('{"type": "object"}')

    async def work(backend):
        slow = await backend.submit(request(1, waits=True, grammar="slow"))
        gone = await backend.submit(request(2, waits=True, grammar="slow"))
        backend.cancel(gone.number)
        answer = asyncio.ensure_future(slow.said.__anext__())
        others = [await heard(backend, request(i)) for i in range(3)]
        assert not answer.done()
        first = await answer
        good = await heard(backend, request(3, waits=True, grammar=grammar))
        return others, first, [x.ended async for x in gone.said], good

    others, first, gone, good = served(supervisor(tmp_path), work)
    assert others == [expected(request(i)) for i in range(3)] and good == expected(request(3))
    assert first.message == "grammar: it is too slow; give another" and gone == ["cancelled"]


@pytest.mark.catches("seats-are-not-told")
@pytest.mark.catches("journal-is-open-to-all")
@pytest.mark.catches("journal-stays")
def test_the_journal(tmp_path):
    """Only its owner reads it, it has what is under way, and is gone after the end."""
    path = tmp_path / "journal"
    path.write_text(
        '{"begin": 1, "request": {}}\nbroken\n{"begin": 2}\n{"said": {}, "ended": [1]}\n'
    )
    journal = Journal(path)
    assert journal.left == 1
    one = request(4)

    async def work(backend):
        started = await backend.submit(one)
        seated, first = await anext(started.said), await anext(started.said)
        assert seated.token is None and seated.ended is None
        mode = stat.S_IMODE(path.stat().st_mode)
        while len(lines := path.read_text().splitlines()) < 2:
            await asyncio.sleep(0.01)
        rest = [x async for x in started.said]
        while path.read_text():
            await asyncio.sleep(0.01)
        return first, mode, [json.loads(line) for line in lines], rest

    backend = supervisor(tmp_path, step_s=0.02, journal=journal)
    first, mode, lines, rest = served(backend, work)
    assert mode == 0o600
    assert lines[0]["request"]["prompt"] == list(one.prompt)
    assert lines[1]["said"] == {"0": [first.token]}
    assert rest[-1].ended
    assert not path.exists()


@pytest.mark.catches("full-disk-fails-others")
def test_a_full_disk_turns_away_one_request(tmp_path, monkeypatch):
    """What has begun goes on, what begins is told to come later, until there is room."""
    lines, path, full = [], tmp_path / "journal", [False]
    write = os.write

    def writes(file, data):
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(file, data)

    async def work(backend):
        running = await backend.submit(request(1))
        full[0] = True
        with pytest.raises(EngineDown):
            await backend.submit(request(2))
        found = [x.token async for x in running.said if x.token is not None]
        full[0] = False
        return found, await heard(backend, request(2))

    backend = supervisor(tmp_path, journal=Journal(path), tell=lines.append)
    monkeypatch.setattr("colossax.serve.engine.journal.os.write", writes)
    found, later = served(backend, work)
    assert found == expected(request(1))[0] and later == expected(request(2))
    assert any("cannot be written" in line for line in lines)
    assert not any("the engine ended" in line for line in lines)


def test_unfinished_requests_of_a_journal_that_is_not_there(tmp_path):
    assert unfinished(tmp_path / "none") == 0


def test_what_kills_slowly_is_found_among_others():
    """Others speak in each engine's life; one never does, though it is not the only new one."""
    handing, lives = Handing(), 0
    alive = list(range(6))
    while 3 in alive:
        lives += 1
        handed = handing.begin(alive)
        for number in handed:
            handing.began(number)
            if number != 3:
                handed += handing.said(number)
        for number in handing.died():
            alive.remove(number)
        assert lives < 20
    assert alive == [0, 1, 2, 4, 5] and lives == QUIET_DEATHS + DEATHS_ALONE


@pytest.mark.catches("suspects-all-at-once")
def test_suspects_are_handed_over_one_by_one():
    handing = Handing()
    for _ in range(QUIET_DEATHS):
        for number in handing.begin([1, 2, 3, 5]):
            if number != 5:  # which waits for a seat each time
                handing.began(number)
        assert handing.died() == []
    assert handing.add(4) == [4]
    assert handing.begin([1, 2, 3, 4, 5]) == [4, 5, 1]
    assert handing.said(4) == [] and handing.said(1) == [2]
    handing.left(3)
    assert handing.said(2, ended=True) == [] and not handing.has(2) and handing.has(1)


@pytest.mark.catches("cancel-dies-with-the-engine")
def test_a_cancel_outlives_the_engine(tmp_path):
    """It was sent to an engine that could not hear it any more."""

    async def work(backend):
        while not backend.ready():
            await asyncio.sleep(0.01)
        started = await backend.submit(request(1, max_tokens=200, ends=()))
        await anext(started.said)
        os.kill(backend.pid, signal.SIGSTOP)
        backend.cancel(started.number)
        await asyncio.sleep(0.1)
        os.kill(backend.pid, signal.SIGKILL)
        rest = [one async for one in started.said]
        return rest[-1], await heard(backend, request(2))

    last, other = served(supervisor(tmp_path, step_s=0.01), work)
    assert last.ended == "cancelled" and other == expected(request(2))


@pytest.mark.catches("no-process-no-engine")
def test_no_process_can_be_made_for_a_while(tmp_path, monkeypatch):
    lines, failures = [], [2]

    async def work(backend):
        made = backend._started

        def fails():
            if failures[0]:
                failures[0] -= 1
                raise OSError(24, "Too many open files")
            return made()

        monkeypatch.setattr(backend, "_started", fails)
        while not backend.ready():
            await asyncio.sleep(0.01)
        os.kill(backend.pid, signal.SIGKILL)
        return await heard(backend, request(2))

    assert served(supervisor(tmp_path, tell=lines.append), work) == expected(request(2))
    assert sum("no engine can be started" in line for line in lines) == 2


@pytest.mark.catches("journal-grows-for-ever")
def test_a_journal_keeps_what_is_under_way_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("colossax.serve.engine.journal.MOST_BYTES", 1000)
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(0, {"prompt": [1, 2]})
    for i in range(1, 200):
        journal.begin(i, {"prompt": [3]})
        journal.told({0: [i], i: [5]}, [i])
    assert path.stat().st_size < 3000 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert unfinished(path) == 1
    said = [json.loads(line).get("said", {}).get("0", []) for line in path.read_text().splitlines()]
    assert [token for tokens in said for token in tokens] == list(range(1, 200))
    journal.close()
    assert not path.exists()


@pytest.mark.catches("journal-over-any-file")
def test_a_file_that_is_no_journal_is_left(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine\n")
    with pytest.raises(InputError, match="--journal: .* holds something else"):
        Journal(path)
    assert path.read_text() == "mine\n"


def test_a_socket_of_any_number(tmp_path):
    """What select cannot look at."""
    import socket

    from colossax.serve.engine.wire import Wire, packed

    ours, theirs = socket.socketpair()
    number = 1500
    os.dup2(theirs.fileno(), number)
    theirs.close()
    with ours, socket.socket(fileno=number) as sock:
        ours.sendall(packed({"do": "close"}))
        assert Wire(sock).pending(1.0) == [{"do": "close"}]


def test_an_engine_ends_with_a_server_that_is_killed(tmp_path):
    """Also while it loads, when it does not look at its socket."""
    import subprocess
    import time

    script = (
        "import sys; from colossax.serve.engine.supervisor import Supervisor\n"
        "toy = [sys.executable, '-m', 'tests.serve.engine.toy', 'none', '0', sys.argv[1]]\n"
        "one = Supervisor(toy)\n"
        "print(one.pid, flush=True); import time; time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "mark")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        pid = int(one.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        one.kill()
    os.kill(pid, signal.SIGCONT)
    until = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def runs(pid):
    """Whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
