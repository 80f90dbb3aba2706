"""A scheme of one's own is a function of operands, scoring and settings, and no more."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from colossax.pallas.attention import Mask, attend
from colossax.sharding.sequence import positions_local
from tests.sharding.sequence.support import Layout, assert_close, operands, results, truth

island = importlib.import_module("colossax.sharding.attention.attend")


def everything_everywhere(given, scoring, settings):
    """Every rank gathers what all have, and attends as on one device; autodiff does the rest."""
    axes, names = settings.axes, settings.axes.circle.names
    length = given.lengths[0]

    def gathered(x):
        return jax.lax.all_gather(x, names, axis=1, tiled=True)

    def places(rank):
        return positions_local(rank, length=length, ranks=axes.size, order=settings.order)

    mask = dataclasses.replace(
        given.mask,
        q_positions=places(axes.source_local()),
        kv_positions=jnp.concatenate([places(jnp.int32(rank)) for rank in range(axes.size)], 1),
        kv_segments=gathered(given.mask.kv_segments),
    )
    whole = given.replace(k=gathered(given.k), v=gathered(given.v), mask=mask)
    return attend(whole, scoring, return_lse=True, implementation="reference")


@pytest.mark.catches("scheme-without-sinks")
def test_a_scheme_of_ones_own_takes_the_place_of_the_ring(monkeypatch):
    seen = []

    def scheme(*given):
        seen.append(given[2].order)
        return everything_everywhere(*given)

    monkeypatch.setitem(island._SCHEMES, "ring", scheme)
    segments = jnp.repeat(jnp.asarray([[0, 1, 2, -1]]), 8, axis=1)
    mask = Mask(causal=True, window=(9, 0), q_segments=segments, kv_segments=segments)
    arrays = operands(heads=4, slopes=True, sinks=True, b=1)
    options = {"mask": mask, "soft_cap": 3.0, "scale": 0.3}
    found = results(Layout(ring=2, ulysses=2), *arrays, **options)
    assert_close(found, results(truth, *arrays, **options))
    assert seen and set(seen) == {"zigzag"}
