"""Seams of layer runs: own orders of layers, a loss cut at its stack, gradients in two parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Segment
from colossax.errors import PlanError
from colossax.layerwise import Layer, Scanned, cut_loss, running
from colossax.models import LlamaConfig, maker
from colossax.nn import describe, initialise
from colossax.offload import fetch
from colossax.planner.counting.traced_flops import traced_flops
from colossax.sharding import use
from colossax.tasks import next_token_loss
from tests.oracle import assert_trees_close

CONFIG = LlamaConfig(vocab=32, embed=8, layers=3, heads=2, kv_heads=1, mlp=12, max_seq=8)


def language_model(plan):
    """(loss of a dict of parameters and a batch, parameters) of a small model."""
    bound = plan.bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(CONFIG))
    params = initialise(spec, bound, jax.random.key(0))
    terms = next_token_loss()

    def loss(params, batch):
        with use(bound):
            found, _ = terms(spec.merge(params), batch)
        total, weight, _ = found["cross_entropy"]
        return total / weight

    return loss, params


def batch(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab, (2, 9)).astype(np.int32)
    weights = rng.integers(0, 2, (2, 8)).astype(np.float32)
    found = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return jax.tree.map(jnp.asarray, found)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def layer_of(layers, rows, carry, side):
    """A layer of a run as one object; every floating side input is differentiated."""

    def apply(row, carry, side, number):
        carry, _, sums = layers.apply(row, carry, side, layers.state(number))
        return carry, sums

    return Layer(
        layers.checkpoint(apply), fetch(rows, 0), carry, side, jax.tree.map(is_float, side)
    )


class Pass:
    """One batch on its way through a cut loss, layer by layer, by whoever calls."""

    def __init__(self, cut, params, batch):
        self.cut, self.params, self.batch = cut, params, batch
        start = jax.vjp(lambda p: cut.before(p, batch), params)
        (self.carry, self.side, self.crossing), self.pull_before = start
        self.runs = [run.layers for run in cut.runs]
        self.rows, self.pull_rows = jax.vjp(self.stacks, params)
        pairs = zip(self.runs, self.rows, strict=True)
        self.layers = [layer_of(*each, self.carry, self.side) for each in pairs]
        self.order = [(r, i) for r, run in enumerate(self.runs) for i in range(run.count)]
        self.kept, self.pending = {}, {}

    def stacks(self, params):
        """Rows of all runs; a single layer becomes one row."""
        own = [run.params(params, self.batch) for run in self.cut.runs]
        lift = [jnp.asarray if run.stacked else lambda x: x[None] for run in self.runs]
        return [jax.tree.map(f, rows) for f, rows in zip(lift, own, strict=True)]

    def inputs(self, at):
        r, i = at
        return fetch(self.rows[r], i), self.side, jnp.int32(self.runs[r].origin + i)

    def forward(self, at):
        row, side, number = self.inputs(at)
        out = self.layers[at[0]].forward(row, self.carry, side, number)
        (self.carry, _), self.kept[at] = out

    def turn(self):
        """The loss, and the gradient that backward begins with."""
        outputs = [(self.carry, {}) for _ in self.runs]

        def rest(params, outputs, crossing):
            return self.cut.after((params, self.batch), outputs, crossing)

        self.loss, pull = jax.vjp(rest, self.params, outputs, self.crossing)
        self.found, douts, self.dcrossing = pull(jnp.float32(1))
        self.dcarry = douts[-1][0]
        self.dside = [jnp.zeros_like(x) for x in jax.tree.leaves(self.side) if is_float(x)]

    def backward(self, at):
        """What the layer before waits for; its weights' gradient is left pending."""
        apart = self.layers[at[0]].apart()
        found = apart.input_gradient(*self.inputs(at), self.kept[at], (self.dcarry, {}))
        self.dcarry, more, self.pending[at] = found
        self.dside = jax.tree.map(jnp.add, self.dside, more)

    def weights(self, at):
        apart = self.layers[at[0]].apart()
        return apart.weight_gradient(*self.inputs(at), self.kept[at], self.pending[at])

    def gradients(self):
        """By all parameters, those of the layers' weights made now."""
        rows = {at: self.weights(at) for at in self.order}
        stacks = [
            jax.tree.map(lambda *xs: jnp.stack(xs), *[rows[at] for at in self.order if at[0] == r])
            for r in range(len(self.runs))
        ]
        given = iter(self.dside)
        dside = jax.tree.map(
            lambda x: next(given) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0),
            self.side,
        )
        start = self.pull_before((self.dcarry, dside, self.dcrossing))[0]
        return jax.tree.map(lambda *xs: sum(xs), self.found, start, self.pull_rows(stacks)[0])


def by_turns(loss, params, batches):
    """A schedule of one's own: two batches a layer each in turn, all weights' gradients last."""
    cut = cut_loss(loss, params, batches[0])
    one, two = (Pass(cut, params, each) for each in batches)
    for at in one.order:
        one.forward(at), two.forward(at)
    one.turn(), two.turn()
    for at in reversed(one.order):
        two.backward(at), one.backward(at)
    return one.loss + two.loss, jax.tree.map(jnp.add, one.gradients(), two.gradients())


@pytest.mark.catches("cut-outputs")
@pytest.mark.catches("residual-input")
@pytest.mark.parametrize("segments", [(Segment(),), (Segment(count=1), Segment(remat="full"))])
def test_a_loss_cut_at_its_stack_is_the_loss_in_any_order_of_layers(segments):
    loss, params = language_model(Plan(segments=segments))
    batches = [batch(0), batch(1)]
    whole = jax.value_and_grad(lambda params: sum(loss(params, each) for each in batches))
    want, want_grads = jax.jit(whole)(params)
    got, grads = jax.jit(lambda params: by_turns(loss, params, batches))(params)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_trees_close(grads, want_grads)


def dots(program, *args):
    return str(jax.make_jaxpr(program)(*args)).count("dot_general")


def flops(program, *args):
    return traced_flops(jax.make_jaxpr(program)(*args)).flops


@pytest.mark.catches("apart-repeats")
@pytest.mark.parametrize("remat", ["none", "full", "dots", "qkv+mlp"])
def test_the_two_parts_of_a_transpose_share_no_matmul(remat):
    loss, params = language_model(Plan(segments=(Segment(remat=remat),)))
    one = Pass(cut_loss(loss, params, batch(0)), params, batch(0))
    (layer,), at = one.layers, (0, 0)
    one.forward(at)
    apart = layer.apart()
    args = (*one.inputs(at), one.kept[at], (one.carry, {}))
    *_, pending = apart.input_gradient(*args)
    first = dots(apart.input_gradient, *args)
    second = dots(apart.weight_gradient, *args[:-1], pending)
    assert second == 7  # one for each matrix of the layer
    assert first + second == dots(layer.transpose, *args)
    parts = flops(apart.input_gradient, *args) + flops(apart.weight_gradient, *args[:-1], pending)
    assert parts == pytest.approx(flops(layer.transpose, *args), rel=0.01)


def test_what_cannot_be_cut_is_refused():
    loss, params = language_model(Plan())
    with pytest.raises(PlanError, match="calls no layer stack"):
        cut_loss(lambda x: x, jnp.ones(2))
    with pytest.raises(PlanError, match="'layers' inside a transformation of its own"):
        cut_loss(jax.checkpoint(loss), params, batch(0))
    with pytest.raises(PlanError, match="'layers' more than once"):
        cut_loss(lambda *args: loss(*args) + loss(*args), params, batch(0))


class Counting(Scanned):
    """A runner that notes what it is asked for, and does it."""

    def __init__(self):
        self.asked = []

    def run(self, layers, *args):
        self.asked.append((layers.key, layers.first, layers.count))
        return super().run(layers, *args)


@pytest.mark.catches("runner-ignored")
def test_a_function_traced_under_one_runner_is_traced_anew_under_another():
    loss, params = language_model(Plan(segments=(Segment(count=1), Segment())))
    jitted = jax.jit(loss)
    want = jitted(params, batch(0))
    for _ in range(2):
        runner = Counting()
        with running(runner):
            assert jitted(params, batch(0)) == want
        assert runner.asked == [(("layers", 0), 0, 1), (("layers", 1), 1, 2)]
