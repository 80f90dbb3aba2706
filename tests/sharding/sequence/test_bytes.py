"""What each scheme sends, counted in compiled programs, equals its formula.

In float32: on a CPU XLA widens messages of narrower floats; tests/aot/test_sequence.py counts them.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import assert_collectives, collectives
from colossax.pallas.attention import Mask, xla
from tests.sharding.sequence.support import Layout, operands

CAUSAL = Mask(causal=True)
B, S, HEADS, KV_HEADS, H = 2, 64, 8, 2, 4


@pytest.fixture(autouse=True)
def one_tile(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 256})


def key_bytes(layout):
    """k and v of one rank, and as much their gradients."""
    return B * S // (layout.outer * layout.ring) * KV_HEADS // layout.tensor * 2 * H * 4


def island_of(layout, mask=CAUSAL, hv=H):
    """Output and log-partition as a function of q, k, v, and their shapes."""
    arrays = operands(b=B, s=S, heads=HEADS, kv_heads=KV_HEADS, h=H, hv=hv)
    shapes = jax.eval_shape(lambda: arrays[:3])
    return lambda *qkv: layout.island(*qkv, None, None, mask), shapes


def texts(layout, **options):
    """Compiled forward and backward passes, the one without the other."""
    run, shapes = island_of(layout, **options)
    results, pull = jax.eval_shape(lambda *qkv: jax.vjp(run, *qkv), *shapes)
    return (
        jax.jit(run).lower(*shapes).compile().as_text(),
        jax.jit(lambda pull, x: pull(x)).lower(pull, results).compile().as_text(),
    )


def check(layout, forward, backward, **options):
    for text, expected in zip(texts(layout, **options), (forward, backward), strict=True):
        expected = {pair: size for pair, size in expected.items() if size}
        assert_collectives(text, expected, mesh=layout.plan.mesh, within=0.0)


def ring(layout, kv, inner=None):
    """Expected permutes of `inner` hops along the ring and O - 1 between rings."""
    hops = layout.ring - 1 if inner is None else inner
    hops *= layout.outer
    sent = {("collective-permute", layout.axes.inner): hops * kv}
    sent |= {("collective-permute", "ring_out"): (layout.outer - 1) * kv}
    return sent, {pair: 2 * size for pair, size in sent.items()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ring=8),
        Layout(ring=4, order="natural"),
        Layout(outer=2, ring=4),
        Layout(outer=4, ring=2),
        Layout(outer=8),
    ],
    ids=str,
)
def test_ring(layout):
    forward, backward = ring(layout, kv=key_bytes(layout))
    hops = layout.outer * layout.ring - 1
    assert sum(forward.values()) == hops * key_bytes(layout)
    assert sum(backward.values()) == 2 * hops * key_bytes(layout)
    check(layout, forward, backward)


@pytest.mark.parametrize(
    ("order", "window", "hops"),
    [
        ("zigzag", (3, 0), 2),  # to the neighbour's, and on to the one on the other side
        ("natural", (9, 0), 2),
    ],
)
def test_a_window_leaves_hops_out(order, window, hops):
    layout = Layout(ring=8, order=order)
    check(layout, *ring(layout, key_bytes(layout), hops), mask=Mask(causal=True, window=window))


def test_keys_and_values_are_one_message_where_their_shapes_agree():
    layout = Layout(ring=2)
    for hv, messages in ((H, [2]), (2 * H, [1, 2])):
        sent = [B * S // 2 * KV_HEADS * H * 4 * part for part in messages]
        forward, backward = (collectives(text, layout.plan.mesh) for text in texts(layout, hv=hv))
        assert sorted(c.bytes for c in forward) == sent
        assert sorted(c.bytes for c in backward) == sorted(2 * sent)


def test_masks_of_keys_are_gathered_and_natural_positions_are_not():
    layout = Layout(ring=4)
    segments = jnp.arange(S, dtype=jnp.int32)[None] // 40
    mask = Mask(causal=True, window=(40, 0), q_segments=segments, kv_segments=segments)
    forward, backward = ring(layout, key_bytes(layout))
    for sent in (forward, backward):
        sent["all-gather", "ring"] = S * 4
    check(layout, forward, backward, mask=mask)


def test_gather():
    layout = Layout(ring=8, scheme="all_gather")
    ranks, kv = 8, key_bytes(layout)
    gathered = {("all-gather", "ring"): ranks * kv}
    check(layout, gathered, gathered | {("reduce-scatter", "ring"): ranks * kv})
    sent = [c.ring_bytes for c in collectives(texts(layout)[1], layout.plan.mesh)]
    assert sent == 2 * [(ranks - 1) * kv]


def test_ring_self_attention():
    layout = Layout(ring=4, scheme="self_attention")
    expected = {("collective-permute", "ring"): 3 * key_bytes(layout)}
    check(layout, expected, expected)


@pytest.mark.parametrize(("ulysses", "kv_heads"), [(2, 2), (4, 4)])
def test_ulysses_around_a_ring(ulysses, kv_heads):
    """Kv heads are repeated where there are fewer than devices, and the ring sends its share."""
    layout = Layout(ring=2, ulysses=ulysses)
    tokens = B * S // (2 * ulysses)
    heads = 2 * HEADS + 2 * kv_heads  # of q and the output, k and v
    exchanged = {("all-to-all", "ulysses"): tokens * (heads * H + HEADS) * 4}
    kv = B * S // 2 * kv_heads // ulysses * 2 * H * 4
    forward, backward = ring(layout, kv)
    check(layout, forward | exchanged, backward | exchanged)


def test_an_output_alone_exchanges_no_log_partition():
    layout = Layout(ulysses=2)
    run, shapes = island_of(layout)

    def both(dout, *qkv):
        out, pull = jax.vjp(lambda *x: run(*x)[0], *qkv)
        return out, pull(dout)

    text = jax.jit(both).lower(shapes[0], *shapes).compile().as_text()
    sent = B * S // 2 * (2 * HEADS + 2 * KV_HEADS) * H * 4
    assert_collectives(
        text, {("all-to-all", "ulysses"): 2 * sent}, mesh=layout.plan.mesh, within=0.0
    )


@pytest.mark.parametrize(("saved", "hops"), [("attention", 3 + 6), ("nothing", 3 + 2 + 6)])
def test_layers_that_save_attention_by_name_do_not_run_it_again(saved, hops):
    """Run again in the same computation, its first hop serves the backward pass as well."""
    layout, layers = Layout(ring=4), 5
    run, shapes = island_of(layout)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(saved))
    def layer(x, scale):
        return run(x * scale, x[:, :, :KV_HEADS], x[:, :, KV_HEADS : 2 * KV_HEADS])[0], None

    def loss(x):
        return jnp.sum(jax.lax.scan(layer, x, jnp.ones((layers,)))[0])

    text = jax.jit(jax.grad(loss)).lower(shapes[0]).compile().as_text()
    found = [c for c in collectives(text, layout.plan.mesh) if c.kind == "collective-permute"]
    assert sum(c.count for c in found) == layers * hops
