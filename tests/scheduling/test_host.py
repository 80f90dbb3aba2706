"""Host memory behind the pages: what goes there, what comes back, and what it saves."""

import pytest

from colossax.errors import InputError
from colossax.scheduling.host import Host
from tests.scheduling.world import World

SIZES = {"seats": 2, "pages": 8, "pages_a_seat": 8, "mixed": 16, "page_tokens": 4}
FIRST, SECOND = tuple(range(20)), tuple(range(20, 48))


def keys(count):
    return [bytes([i]) for i in range(count)]


def test_the_oldest_makes_room():
    host, (a, b, c, d) = Host(2), keys(4)
    for page, key in enumerate((a, b, c)):
        host.put(key, page)
    assert [key in host for key in (a, b, c, d)] == [False, True, True, False]
    moves = host.moves()
    assert dict(moves["out"]).keys() == {1, 2} and not moves["back"]
    assert host.moves() == {"out": (), "back": ()}
    place = host.claim(b)
    assert (b in host, host.held) == (False, 1)
    host.fetch(place, 7)
    host.put(d, 3)  # the place of b is read before the next step, so c goes
    moves = host.moves()
    assert moves["back"] == ((place, 7),) and [page for page, _ in moves["out"]] == [3]
    assert dict(moves["out"])[3] != place
    assert [key in host for key in (a, b, c, d)] == [False, False, False, True]


def test_nothing_is_kept_where_all_places_are_read():
    host, (a, b) = Host(1), keys(2)
    host.put(a, 0)
    host.fetch(host.claim(a), 1)
    host.put(b, 2)
    assert b not in host and host.moves() == {"out": ((0, 0),), "back": ((0, 1),)}
    host.put(b, 2)
    assert b in host and host.moves() == {"out": ((2, 0),), "back": ()}


def test_what_is_computed_again_goes():
    host, (a,) = Host(1), keys(1)
    host.put(a, 0)
    host.forget(a)
    assert a not in host and host.moves() == {"out": (), "back": ()}
    host.forget(a)
    host.put(a, 4)
    assert host.moves()["out"] == ((4, 0),)


def test_without_places_nothing_goes_out():
    host = Host(0)
    host.put(b"a", 0)
    assert b"a" not in host and (host.out, host.held) == (0, 0)


def computed(world):
    return world.scheduler.stats.planned


@pytest.mark.catches("what-is-in-the-host-is-not-found")
@pytest.mark.parametrize("host_pages", [0, 3, 8])
def test_a_prefix_that_had_to_go_costs_no_prompt_token(host_pages):
    """Five pages and a token; another's seven leave the first page where it is.

    Of the others the deepest has gone first, and is the first to go for good.
    """
    world = World.of(**SIZES, host_pages=host_pages)
    for prompt in (FIRST, SECOND[:24]):
        world.ask(*prompt, 49, max_tokens=1)
        world.drain()
    before, stats = computed(world), world.scheduler.stats
    assert (stats.hosted, stats.out) == (min(4, host_pages), 4 if host_pages else 0)
    world.ask(*FIRST, 49, max_tokens=1)
    world.drain()
    assert world.scheduler.stats.back == min(4, host_pages)
    assert computed(world) - before == 21 - 4 * (1 + min(4, host_pages))
    world.verdict()


@pytest.mark.catches("what-is-in-the-host-is-not-found")
def test_who_had_to_leave_comes_back_by_copies():
    found = {}
    for host_pages in (0, 16):
        world = World.of(**SIZES, host_pages=host_pages)
        for prompt in (FIRST[:9], SECOND[:9]):
            world.ask(*prompt, max_tokens=23)
        world.drain()
        world.verdict()
        found[host_pages] = world.scheduler.stats
    assert found[0].preemptions and found[16].preemptions == found[0].preemptions
    assert not found[0].out and found[16].back
    assert found[16].reused == found[0].reused + 4 * found[16].back
    assert found[16].planned == found[0].planned - 4 * found[16].back


def test_refusals():
    with pytest.raises(InputError, match="host_pages: found -1"):
        World.of(**SIZES, host_pages=-1)
