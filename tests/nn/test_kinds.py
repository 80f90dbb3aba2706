"""Stacks of several kinds: the values of a plain loop, one numbering, caches apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import Plan, Segment
from colossax.errors import InputError, PlanError
from colossax.nn import LayerStack, StackOutput, describe, initialise, param, pure
from colossax.nn.stack.kinds import stretches
from colossax.sharding import use
from tests.oracle import assert_trees_close


class Layer(nnx.Module):
    """Kinds differ in the width of their weights, in what they cache and in what they count."""

    def __init__(self, width, name, *, rngs):
        self.name = name
        self.up = param(jax.random.normal(rngs.params(), (4, width)), ("embed", "mlp"))
        self.down = param(jax.random.normal(rngs.params(), (width, 4)), ("mlp", "embed"))

    def __call__(self, x, side, state):
        x = x + jnp.tanh(x @ self.up[...]) @ self.down[...] * side
        carried = state.carried
        if carried is not None:  # its own row of its own kind's cache
            carried = carried.at[state.row].set(jnp.resize(x[0], carried.shape[1:]))
        scanned = None if state.scanned is None else state.scanned + x.sum()
        state = dataclasses.replace(state, carried=carried, scanned=scanned)
        sums = {"number": state.index.astype(jnp.float32)}
        if self.name == "wide":
            sums["load"] = jnp.abs(x).sum(axis=0)
        return x, state, sums


KINDS = {
    "wide": lambda rngs: Layer(6, "wide", rngs=rngs),
    "thin": lambda rngs: Layer(3, "thin", rngs=rngs),
}
ORDERS = [
    ["wide"] * 2 + ["thin"] * 4,  # one kind after the other
    ["thin", "thin", "wide"] * 2,  # groups
    ["wide"] + ["thin", "wide"] * 2 + ["thin", "thin"],  # groups between others
]
SEGMENTS = [(Segment(),), (Segment(count=1), Segment(remat="full"))]
X = jax.random.normal(jax.random.key(5), (3, 4))


ONE = (Segment(),)


def stack(order, segments=ONE):
    with use(Plan(mesh={"fsdp": 1}, segments=segments).bind(jax.devices()[:1])):
        return LayerStack(KINDS, order, rngs=nnx.Rngs(params=0))


def run(made, caches, starts):
    """What a stack gives, compiled."""

    def call(x):
        found = made(x, 0.1, carried=caches, scanned=starts)
        return {name: getattr(found, name) for name in ("carry", "sums", "carried", "scanned")}

    return StackOutput(**jax.jit(call)(X))


def loop(order, x, side, key):
    """The slow truth: each layer made by its own key and called in turn, and all that it says."""
    sums, rows = [], {"wide": [], "thin": []}
    for number, kind in enumerate(order):
        layer = KINDS[kind](nnx.Rngs(jax.random.fold_in(key, number)))
        x = x + jnp.tanh(x @ layer.up[...]) @ layer.down[...] * side
        rows[kind].append(x)
        load = jnp.abs(x).sum(axis=0) if kind == "wide" else jnp.zeros(4)
        sums.append(load)
    return x, jnp.stack(sums), rows


@pytest.mark.catches("kinds-rows")
@pytest.mark.catches("kinds-numbers")
@pytest.mark.catches("kinds-carried")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("order", ORDERS)
def test_layers_of_several_kinds_are_those_of_a_plain_loop(order, segments):
    made = stack(order, segments)
    caches = {kind: jnp.zeros((order.count(kind), n)) for kind, n in (("wide", 5), ("thin", 2))}
    starts = {kind: jnp.arange(1.0, 1 + order.count(kind)) for kind in caches}
    found = run(made, caches, starts)
    x, load, rows = loop(order, X, 0.1, nnx.Rngs(params=0).params())
    np.testing.assert_allclose(found.carry, x, rtol=1e-5)
    np.testing.assert_allclose(found.sums["load"], load, rtol=1e-5)
    assert found.sums["number"].tolist() == list(range(len(order)))
    for kind, each in rows.items():
        width = caches[kind].shape[1]
        want = [np.resize(np.asarray(row[0]), width) for row in each]
        np.testing.assert_allclose(found.carried[kind], want, rtol=1e-5)
        want = [start + row.sum() for start, row in zip(starts[kind], each, strict=True)]
        np.testing.assert_allclose(found.scanned[kind], want, rtol=1e-4)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_gradients_are_those_of_a_plain_loop(order):
    made = stack(order, (Segment(remat="full"),))
    graphdef, _ = nnx.split(made)

    def through(params):
        return jnp.sum(nnx.merge(graphdef, params)(X, 0.1).carry ** 2)

    def looped(rows):
        at, x = dict.fromkeys(rows, 0), X
        for kind in order:
            up, down = (w[at[kind]] for w in rows[kind])
            x = x + jnp.tanh(x @ up) @ down * 0.1
            at[kind] += 1
        return jnp.sum(x**2)

    def by_kind(params):
        stretches = [params["segments"][number] for number in sorted(params["segments"])]
        return {
            kind: [
                jnp.concatenate(
                    [
                        stretch[kind][name].reshape(-1, *stretch[kind][name].shape[-2:])
                        for stretch in stretches
                        if kind in stretch
                    ]
                )
                for name in ("up", "down")
            ]
            for kind in KINDS
        }

    params = pure(made)
    want = jax.jit(jax.grad(looped))(by_kind(params))
    assert_trees_close(by_kind(jax.jit(jax.grad(through))(params)), want)


def test_what_repeats_is_one_scan():
    made = stack(["thin"] * 5 + ["wide"])
    assert [stretch.count for stretch in made.stretches] == [5, 1]
    made = stack((["thin"] * 5 + ["wide"]) * 4)
    (stretch,) = made.stretches
    assert (stretch.group, stretch.repeats) == ((("thin", 5), ("wide", 1)), 4)
    program = str(jax.make_jaxpr(lambda x: made(x, 0.1).carry)(X))
    assert program.count("tanh") == 2  # one layer of each kind, however many there are


@pytest.mark.parametrize("order", ["aaab", "abababc", "aabaabb", "abcabcd", "a"])
def test_blocks_are_all_layers_in_order(order):
    segments = (Segment(),) if len(order) == 1 else (Segment(count=1), Segment())
    found = stretches(order, segments)
    numbers = {n: kind for b in found for kind, _ in b.group for n in b.numbers(kind)}
    assert "".join(numbers[n] for n in range(len(order))) == order
    assert [b.first for b in found] == [sum(b.count for b in found[:i]) for i in range(len(found))]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = LayerStack(KINDS, ORDERS[1], rngs=rngs)


def test_a_kind_has_a_record_of_its_own_on_any_segments_and_mesh():
    found = {}
    for plan in (Plan(mesh={"fsdp": 2}), Plan(segments=(Segment(count=2), Segment()))):
        bound = plan.bind(jax.devices()[:2])
        with use(bound):
            spec = describe(Model)
        params = initialise(spec, bound, jax.random.key(0))
        for info, leaf in zip(jax.tree.leaves(spec.infos), jax.tree.leaves(params), strict=True):
            assert info.path in [f"layers/{k}/{n}" for k in KINDS for n in ("up", "down")]
            assert info.total_layers == ORDERS[1].count(info.path.split("/")[1])
            for i in range(info.layer_count):
                row = leaf[i] if info.stacked else leaf
                want = found.setdefault((info.path, info.first_layer + i), np.asarray(row))
                np.testing.assert_array_equal(row, want)
    assert len(found) == 2 * 6


def test_refusals():
    with pytest.raises(InputError, match=r"of kinds \['thick'\].*factories for \['thin', 'wide'\]"):
        stack(["thick"])
    made = stack(ORDERS[0])
    plan = Plan(segments=(Segment(count=3), Segment())).bind(jax.devices()[:1])
    with use(plan), pytest.raises(PlanError, match="build the model under the plan"):
        made(X, 0.1)
