"""Layers updated during backward: clipping, skipped steps, evaluation, refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import BatchConfig, OffloadConfig, Precision, preset
from colossax.errors import PlanError
from colossax.nn import LayerStack, param
from colossax.optim import adamw, sgd
from colossax.sharding import use
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_trees_close
from tests.step.offloaded.streamed import (
    CONFIG,
    FULL,
    HOST,
    SHARED,
    batch,
    by_path,
    host,
    offloaded,
    started,
    stepped,
)

CLIP = 0.5
EXACT = ("stack", "two_pass", "speculate")
SCALES = (1.0, 0.05, float("nan"), 1.0, 0.05)
"""Times the loss: steps that clip, that do not, and one that is skipped."""


def scaled_loss(model, batch):
    """The next-token loss times a number from the batch."""
    terms, metrics = next_token_loss(z_loss=1e-3)(model, batch)
    scale = batch["scale"][0]
    return {name: (scale * t, *rest) for name, (t, *rest) in terms.items()}, metrics


def scaled(number, scale, rows=8):
    return {**batch(number, rows), "scale": np.full(rows, scale, np.float32)}


BATCHES = [scaled(number, scale) for number, scale in enumerate(SCALES)]


def arrays(state):
    return jax.tree.map(np.asarray, (state["params"], state["opt_state"]))


def run(plan, devices=None, loss=scaled_loss):
    """Metrics by step of a run that is checked to leave skipped steps' state alone, and its end."""
    state, step = started(plan, adamw(1e-2, eps=1e-5), loss=loss, clip_norm=CLIP, devices=devices)
    found = []
    for scale, each in zip(SCALES, BATCHES, strict=True):
        before = arrays(state)
        state, [metrics] = stepped(state, step, batches=[each])
        found.append(metrics)
        if np.isnan(scale):
            jax.tree.map(np.testing.assert_array_equal, arrays(state), before)
    return found, by_path(step, state["params"])


def cut(pieces):
    return FULL.replace(batch=BatchConfig(accumulation=pieces))


@functools.cache
def truth(pieces):
    return run(cut(pieces))


def assert_as_ordinary(found, pieces):
    assert_same(found, truth(pieces))


def assert_same(found, truth):
    (metrics, params), (want, wanted) = found, truth
    clipped = [one["grad_norm"] > CLIP for one in want]
    assert clipped == [scale == 1 for scale in SCALES]
    assert [one["skipped"] for one in metrics] == [0, 0, 1, 1, 1]
    for name in ("loss", "grad_norm"):
        values = [[one[name] for one in each] for each in (metrics, want)]
        np.testing.assert_allclose(*values, rtol=1e-6)
    assert_trees_close(params, wanted)


@pytest.mark.parametrize(
    ("clipping", "pieces"),
    quick_first(
        itertools.product(EXACT, [2, 1]), (("stack", 2), ("two_pass", 1), ("speculate", 2))
    ),
)
def test_clipping_is_exact_and_steps_that_are_not_finite_change_nothing(clipping, pieces):
    assert_as_ordinary(run(host(cut(pieces), clipping=clipping)), pieces)


def test_speculation_is_exact_on_several_devices(devices):
    found, wanted = (run(plan, devices) for plan in (host(cut(1), clipping="speculate"), cut(1)))
    assert_same(found, wanted)


def test_speculation_gives_up_the_old_layers_without_lending_their_memory():
    """They are read until the end, so the new ones lie elsewhere; else XLA copies whole stacks."""
    lent, layers = {}, {}
    for clipping in ("speculate", "stack"):
        plan = host(clipping=clipping)
        state, step = started(plan, adamw(1e-2), loss=scaled_loss, clip_norm=CLIP)
        stats = step.lower(state, step.place(BATCHES[0])).compile().memory_analysis()
        lent[clipping] = stats.alias_size_in_bytes + stats.host_alias_size_in_bytes
        stacks = step.streaming.stacks(state["params"], state["opt_state"])
        layers[clipping] = sum(x.nbytes for x in jax.tree.leaves(stacks))
        step(state, BATCHES[0])
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert layers["speculate"] == layers["stack"] == lent["stack"] - lent["speculate"]


@pytest.mark.parametrize(
    ("clipping", "wrap"),
    quick_first(
        itertools.product(EXACT, [jax.jit, jax.checkpoint]),
        [("two_pass", jax.jit), ("speculate", jax.checkpoint)],
    ),
)
def test_so_it_is_where_the_loss_wraps_the_model(clipping, wrap):
    """JAX traces what is inside once, forward and backward."""
    coefficients = {}

    def wrapped(model, batch):
        def arrays(batch):
            terms, metrics = scaled_loss(model, batch)
            coefficients.update({name: term[2] for name, term in terms.items()})
            return {name: term[:2] for name, term in terms.items()}, metrics

        terms, metrics = wrap(arrays)(batch)
        return {name: (*term, coefficients[name]) for name, term in terms.items()}, metrics

    assert_as_ordinary(run(host(cut(1), clipping=clipping), loss=wrapped), 1)


@pytest.mark.sweep
@pytest.mark.parametrize("placement", [SHARED, {"optimizer": 1.0}, {"fused": True}])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("clipping", EXACT)
def test_so_it_is_with_some_layers_on_the_device(clipping, pieces, placement):
    plan = offloaded(cut(pieces), clipping=clipping, **placement)
    assert_as_ordinary(run(plan), pieces)


@pytest.mark.sentinel
def test_layers_may_be_clipped_by_their_own_norms():
    """Under plain SGD of rate 1000 the parameters' change is each layer's clipped gradient."""
    state, step = started(FULL, sgd(1.0))
    grads = by_path(step, jax.jit(step.gradients)(state, batch()).grads)
    layers = {name for name in grads if "layers" in name}
    square = {name: np.square(g).reshape(len(g), -1).sum(1) for name, g in grads.items()}
    norms = np.sqrt(sum(square[name] for name in layers))
    rest = np.sqrt(sum(square[name].sum() for name in grads.keys() - layers))
    clip = float(np.sort(norms)[1:3].mean())
    assert rest > clip
    scale = np.minimum(1, clip / norms)
    wanted = {
        name: g * (scale.reshape(-1, *[1] * (g.ndim - 1)) if name in layers else clip / rest)
        for name, g in grads.items()
    }
    state, step = started(host(clipping="layer"), sgd(1000.0), clip_norm=clip)
    start = by_path(step, state["params"])
    state, [metrics] = stepped(state, step, steps=1)
    moved = {name: (start[name] - p) / 1000 for name, p in by_path(step, state["params"]).items()}
    assert_trees_close(moved, wanted, tolerance=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], np.hypot(rest, np.sqrt(sum(norms**2))), 1e-5)


@pytest.mark.parametrize(
    ("precision", "pieces", "matrices"),
    [
        (Precision(compute="bfloat16"), 1, "bfloat16"),
        (Precision(compute="bfloat16"), 2, "float32"),
        (Precision(compute="bfloat16", reduction="float32"), 1, "float32"),
        (Precision(), 1, "float32"),
    ],
)
def test_gradients_are_kept_as_computed_unless_they_are_added_up(precision, pieces, matrices):
    _, step = started(host(cut(pieces).replace(precision=precision)), sgd(1.0), clip_norm=CLIP)
    part = step.streaming.parts["layers", 0]
    stacks = jax.eval_shape(lambda: part.gradient_stacks(summed=pieces > 1))
    found = {info.path: str(x.dtype) for info, x in zip(part.infos, stacks, strict=True)}
    assert found["layers/mlp/down/w"] == matrices
    assert found["layers/attn_norm/scale"] == "float32"


@pytest.mark.parametrize("clip", [None, CLIP])
def test_without_a_second_pass_a_loss_that_is_not_finite_changes_nothing(clip):
    """Though no gradient shows it."""

    def loss(model, batch):
        terms, metrics = next_token_loss()(model, batch)
        count = terms["cross_entropy"][1]
        return {**terms, "constant": (jnp.sum(batch["scale"]), count, 1.0)}, metrics

    plan = host(cut(2), clipping="layer")
    state, step = started(plan, adamw(1e-2), loss=loss, clip_norm=clip)
    for scale in (np.nan, np.inf):
        for row in range(8):
            before = arrays(state)
            each = scaled(0, 1.0)
            each["scale"][row] = scale
            state, [metrics] = stepped(state, step, batches=[each])
            jax.tree.map(np.testing.assert_array_equal, arrays(state), before)
    assert metrics["skipped"] == 16
    state, [metrics] = stepped(state, step, batches=[scaled(0, 1.0)])
    assert metrics["skipped"] == 16
    assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(arrays(state))[0])


@pytest.mark.parametrize("settings", [HOST, SHARED])
def test_evaluation_and_the_model_are_those_of_the_ordinary_plan(settings):
    found = []
    for plan in (FULL, offloaded(**settings)):
        state, step = started(plan, sgd(1.0))
        totals = jax.tree.map(float, step.evaluate(state, batch()))
        with use(step.bound):
            model = step.model(state)
            found.append((totals, np.asarray(jax.jit(model)(jnp.asarray(batch()["tokens"])))))
    (totals, logits), (want, wanted) = found[1], found[0]
    assert totals == want
    np.testing.assert_allclose(logits, wanted, rtol=1e-6, atol=1e-6)


class Plain(nnx.Module):
    """A model without a layer stack."""

    def __init__(self, rngs):
        self.w = param(jax.random.normal(rngs.params(), (8, 8)), ("embed", "mlp"))


class Chained(nnx.Module):
    """A layer that hands state to the next one."""

    def __init__(self, rngs):
        self.layers = LayerStack(lambda rngs: Link(rngs=rngs), 3, rngs=rngs)


class Link(nnx.Module):
    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (8, 8)), ("embed", "mlp"))

    def __call__(self, x, side, state):
        return x @ self.w[...], state, {}


def chained_loss(model, batch):
    out = model.layers(batch["x"], carried=jnp.zeros(3))
    return {"size": (jnp.sum(out.carry**2), jnp.float32(8), 1.0)}, {}


def twice_loss(model, batch):
    first, _ = next_token_loss()(model, batch)
    second, _ = next_token_loss()(model, batch)
    return {**first, "again": second["cross_entropy"]}, {}


def wrapped_loss(wrap):
    """A loss that gives `wrap` the total of some rows, a function, and the rows."""

    def loss(model, batch):
        def total(rows):
            return next_token_loss()(model, rows)[0]["cross_entropy"][0]

        return {"ce": (wrap(total, dict(batch)), jnp.sum(batch["weights"]), 1.0)}, {}

    return loss


def looped(total, rows):
    """In a loop, which a trace cannot tell from once."""
    halves = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), rows)
    return jax.lax.scan(lambda sum_, half: (sum_ + total(half), None), jnp.float32(0), halves)[0]


def mapped(total, rows):
    halves = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), rows)
    return jnp.sum(jax.vmap(total)(halves))


def branched(total, rows):
    return jax.lax.cond(jnp.sum(rows["weights"]) > 0, total, lambda _: jnp.float32(0), rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": Plain}, "the model has no layer stack"),
        ({"optimizer": optax.adamw(1e-3)}, "this optimizer does not say that it can be"),
        ({"optimizer": lambda dims: optax.adamw(1e-3)}, "does not say that it can be"),
        ({"plan": FULL.replace(offload=OffloadConfig(auto=True))}, "shares are not known yet"),
        (
            {"trainable": lambda info: info.segment is None},
            "no parameter in segment 0 of the layer stack 'layers' learns",
        ),
    ],
)
def test_what_cannot_be_updated_layer_by_layer_is_refused(settings, message):
    given = {"plan": host(), "optimizer": adamw(1e-3), **settings}
    with pytest.raises(PlanError, match=message):
        started(**given)


def test_whole_gradients_for_several_microbatches_are_refused(devices):
    cut = BatchConfig(accumulation=2)
    plan = preset("zero1", segments=FULL.segments, batch=cut)
    with pytest.raises(PlanError, match="reduce_once: whole gradients cannot be kept"):
        started(host(plan), sgd(1.0), devices=devices)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (CONFIG, twice_loss, "the loss calls the layer stack 'layers' 2 times"),
        (
            CONFIG,
            lambda model, batch: (
                {"size": (jnp.sum(model.head.w[...] ** 2), jnp.float32(1), 1.0)},
                {},
            ),
            "the loss calls the layer stack 'layers' 0 times",
        ),
        (Chained, chained_loss, "the layer stack 'layers' hands state from layer to layer"),
    ],
)
def test_a_loss_that_calls_a_stack_in_another_way_is_refused(model, loss, message):
    state, step = started(host(), sgd(1.0), model=model, loss=loss)
    given = batch() if model is CONFIG else {"x": np.ones((8, 8), np.float32)}
    with pytest.raises(PlanError, match=message):
        step(state, given)


@pytest.mark.parametrize("wrap", [looped, mapped, branched])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_a_stack_in_host_memory_is_called_in_no_loop_and_no_branch(wrap, clip):
    state, step = started(host(), sgd(1.0), loss=wrapped_loss(wrap), clip_norm=clip)
    with pytest.raises(PlanError, match="'layers' inside a loop, a branch or vmap"):
        step(state, batch())


def test_a_mistake_in_a_loss_is_shown_as_it_is():
    """Though the stack is called inside a transformation."""

    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, g: (g, g))
    loss = wrapped_loss(lambda total, rows: wrong(jax.jit(total)(rows)))
    state, step = started(host(), sgd(1.0), loss=loss)
    with pytest.raises(TypeError, match="Custom VJP bwd rule"):
        step(state, batch())


def test_a_stack_called_in_a_loop_makes_the_loss_nan():
    looped_loss = wrapped_loss(looped)
    state, step = started(FULL, sgd(1.0), loss=looped_loss)
    assert np.isfinite(stepped(state, step, steps=1)[1][0]["loss"])
    plan = offloaded(fused=True)  # in host memory it is refused
    state, step = started(plan, sgd(1.0), loss=looped_loss, clip_norm=CLIP)
    before = arrays(state)
    state, [metrics] = stepped(state, step, steps=1)
    assert np.isnan(metrics["loss"])
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, arrays(state), before)
