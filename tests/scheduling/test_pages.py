"""Pages as prefixes: which are found and which go first; arrays are used again."""

import subprocess
import sys

import numpy as np
import pytest

from colossax.scheduling.pages import Pool
from colossax.scheduling.prefixes import Prefixes, page_key, root_key
from colossax.scheduling.tables import Tables

ONE, TWO = [page_key(root_key(None), [i]) for i in (1, 2)]


def chains(pages, *lengths):
    """A pool in which chains of pages were named and let go, one after another; and their keys."""
    prefixes = Prefixes()
    pool, every = Pool(pages, prefixes), []
    for name, length in enumerate(lengths):
        taken, keys = [], [root_key(str(name))]
        for i in range(length):
            taken.append(pool.take())
            keys.append(page_key(keys[-1], [i]))
            prefixes.name(taken[-1], keys[-1])
        pool.release(taken)
        every.append(keys[1:])
    return pool, prefixes, every


def found(prefixes, keys):
    return prefixes.longest(keys.__getitem__, len(keys), 0)


@pytest.mark.catches("parents-go-first")
@pytest.mark.catches("recently-used-goes-first")
def test_the_least_recently_used_leaf_goes_first():
    pool, prefixes, (old, new) = chains(6, 3, 3)
    assert (pool.free, pool.cached) == (0, 6)
    for gone in range(1, 7):
        assert pool.take() is not None
        left = found(prefixes, old), found(prefixes, new)
        assert left == (max(0, 3 - gone), min(3, 6 - gone))
    assert pool.take() is None
    assert (pool.free, pool.cached, pool.referenced, pool.available) == (0, 0, 6, 0)


def test_what_is_used_again_is_the_last_to_go():
    pool, prefixes, (old, new) = chains(6, 3, 3)
    again = [prefixes.page(key) for key in old[:2]]
    for page in again:
        pool.refer(page)
    assert (pool.referenced, pool.cached) == (2, 4)
    pool.release(again)
    for _ in range(4):
        pool.take()
    assert (found(prefixes, old), found(prefixes, new)) == (2, 0)


def test_a_page_is_kept_while_anybody_refers_to_it():
    pool, prefixes, (keys,) = chains(2, 1)
    page = prefixes.page(keys[0])
    pool.refer(page)
    pool.refer(page)
    pool.release([page])
    assert (pool.references(page), pool.referenced, pool.cached) == (1, 1, 0)
    assert pool.take() != page
    assert pool.take() is None
    pool.release([page])
    assert pool.take() == page


def test_keys_are_of_all_that_comes_before_and_of_the_adapter():
    keys = {page_key(parent, [3, 4]) for parent in (root_key(None), root_key(""), ONE, TWO)}
    assert len(keys) == 4
    assert len({root_key(None), root_key("a"), root_key("b"), root_key("=a")}) == 4
    assert page_key(ONE, [3, 4]) != page_key(ONE, [4, 3])
    assert {len(key) for key in keys} == {16}


def test_a_table_is_used_again_when_no_step_has_it():
    tables = Tables(3, 4)
    first = tables.current(used=False)
    assert first.dtype == np.int32 and first.shape == (3, 4)
    assert tables.current(used=True) is first  # nothing has changed
    tables.write(1, 2, (5, 6))
    second = tables.current(used=True)
    assert second is not first and not first.any()
    tables.write(2, 0, (7,))
    tables.give_back(first)
    third = tables.current(used=True)
    assert third is first
    assert third.tolist() == [[0] * 4, [0, 0, 5, 6], [7, 0, 0, 0]]
    assert second.tolist() == [[0] * 4, [0, 0, 5, 6], [0] * 4]
    tables.write(2, 0, (8,))
    assert tables.current(used=False) is third and third[2, 0] == 8


def test_scheduling_does_without_jax():
    code = "import sys, colossax.scheduling; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
