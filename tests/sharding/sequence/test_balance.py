"""Zigzag order gives every rank the same work under a causal mask; natural order does not."""

import collections

import jax
import pytest

from colossax.aot import parse_module
from colossax.pallas.attention import Mask, xla
from tests.sharding.sequence.support import Layout, operands

S, RANKS = 256, 4


def pairs_by_rank(monkeypatch, layout):
    """(query, key) pairs of all tiles that each rank computes in a forward pass, per head."""
    counts = collections.Counter()
    tile_forward = xla.tile_forward

    def counted(tile, scoring, rows, columns):
        pairs = tile.q.shape[0] * rows.position.shape[1] * columns.position.shape[1]

        def count(rank):
            counts[int(rank)] += pairs

        jax.debug.callback(count, layout.axes.source_local())
        return tile_forward(tile, scoring, rows, columns)

    monkeypatch.setattr(xla, "tile_forward", counted)
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    arrays, mask = operands(b=1, s=S), Mask(causal=True)
    jax.block_until_ready(jax.jit(layout)(*arrays, mask))
    jax.effects_barrier()
    return [counts[rank] for rank in range(RANKS)]


def check_balanced(pairs):
    limit = (1 + 1 / RANKS) * S**2 / (2 * RANKS)
    assert max(pairs) <= limit, f"pairs {pairs} of the ranks, at most {limit:.0f} wanted"


@pytest.mark.parametrize("layout", [Layout(ring=4), Layout(outer=2, ring=2)], ids=str)
def test_zigzag_is_balanced(monkeypatch, layout):
    pairs = pairs_by_rank(monkeypatch, layout)
    assert len(set(pairs)) == 1
    assert sum(pairs) >= S**2 / 2
    check_balanced(pairs)


@pytest.mark.parametrize(("order", "unknown"), [("zigzag", 1), ("natural", 3)])
def test_only_own_keys_are_masked(monkeypatch, order, unknown):
    """Steps under a mask have a loop over tiles whose length is not known: own, middle, last."""
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    layout, mask = Layout(ring=4, order=order), Mask(causal=True)
    arrays = operands(b=1, s=S)
    text = jax.jit(layout.island).lower(*arrays, mask).compile().as_text()
    loops = [one for one in parse_module(text).by_name.values() if one.opcode == "while"]
    assert sum(loop.trip_count is None for loop in loops) == unknown


def test_natural_order_is_not(monkeypatch):
    pairs = pairs_by_rank(monkeypatch, Layout(ring=4, order="natural"))
    assert pairs == sorted(pairs)
    with pytest.raises(AssertionError, match="at most 10240 wanted"):
        check_balanced(pairs)
