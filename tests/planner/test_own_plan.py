"""`colossax.plan`: plans for models of one's own."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import colossax
from colossax.aot import parse_target
from colossax.errors import InputError, PlanError
from colossax.nn import LayerStack
from colossax.planner.arguments import check_arguments
from colossax.planner.profiling import profile_task
from colossax.planner.profiling.outside import kept_bytes_of
from colossax.planner.searching.parts import Parts, abstract
from colossax.planner.searching.search import search
from colossax.recipes import recipe
from colossax.tasks import task_of


class Tagger(nnx.Module):
    """Plain Flax: no base class, no annotation, no layer stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(128, 32, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 32, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.tags = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, words):
        x = self.words(words)
        x = x + self.attn(x)
        return self.tags(x + self.down(nnx.gelu(self.up(x))))


def mean(model, batch):
    logits = model(batch["words"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"]).mean()


def total(model, batch):
    """The same, as a total and its weight."""
    logits = model(batch["words"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"])
    return {"tags": (jnp.sum(each), jnp.float32(each.size), 1.0)}, {}


OPTIMIZER = optax.adamw(1e-3)


def batch(rows=16):
    random = np.random.default_rng(0)
    return {
        "words": random.integers(0, 128, (rows, 32)).astype(np.int32),
        "tags": random.integers(0, 8, (rows, 32)).astype(np.int32),
    }


def planned(loss=total, **changes):
    given = {"batch": batch(), "target": "h100:1x8", "verify": False, **changes}
    return colossax.plan(Tagger, loss, OPTIMIZER, **given)


def beside(model, batch):
    """A loss that wants what `prepare` adds."""
    logits = model(batch["words"])
    far = jnp.sum(jnp.square(logits - batch["before"]))
    return {"far": (far, jnp.float32(logits.size), 1.0)}, {}


@pytest.mark.catches("prepared-for-nothing")
def test_what_a_loss_is_given_by_prepare_is_there_and_is_counted():
    dims = dict.fromkeys(batch(), ("batch", "seq")) | {"before": ("batch", "seq", None)}
    plain = planned(beside_nothing, batch_dims=dims)

    def prepare(model, batch):
        return {**batch, "before": model(batch["words"])}

    answer = planned(beside, prepare=prepare, batch_dims=dims)
    more = answer.plans[0].seconds.compute / plain.plans[0].seconds.compute
    assert more == pytest.approx(4 / 3)  # a forward pass beside one forward and backward


def beside_nothing(model, batch):
    logits = model(batch["words"])
    return {"far": (jnp.sum(jnp.square(logits)), jnp.float32(logits.size), 1.0)}, {}


@pytest.mark.parametrize("pins", [(), ("tensor=2", "fsdp=4")])
def test_a_plan_found_for_eight_gpus_trains_on_eight_devices_as_on_one(pins):
    answer = planned(pins=pins)
    assert answer.best == answer.plans[0].plan
    state, step = colossax.boost(Tagger, OPTIMIZER, total, answer.best)
    alone, one = colossax.boost(Tagger, OPTIMIZER, total, "zero3", devices=jax.devices()[:1])
    for _ in range(2):
        state, metrics = step(state, batch())
        alone, truth = one(alone, batch())
        np.testing.assert_allclose(metrics["loss"], truth["loss"], rtol=1e-5)
    for pin in pins:
        axis, size = pin.split("=")
        assert answer.best.mesh[axis] == int(size)


@pytest.mark.slow
@pytest.mark.catches("one-number-in-microbatches")
def test_a_batch_whose_loss_cannot_be_cut_is_one_microbatch():
    config, target = recipe("llama_tiny"), parse_target("h100:1x2")
    profile = profile_task(task_of(config), config.plan, target)
    assert not profile.whole
    least = search(profile, config.plan, target, room=1.0).smallest
    room = 1.1 * least.predicted.bytes.total
    assert least.plan.batch.microbatch < rows_of_each(least.plan, profile.rows)
    whole = dataclasses.replace(profile, whole=True)
    assert not search(whole, config.plan, target, room=room).candidates
    for one in search(whole, config.plan, target, room=1e9).candidates:
        assert one.plan.batch.microbatch == rows_of_each(one.plan, profile.rows)


def test_a_loss_of_one_number_has_one_microbatch():
    answer = planned(mean)
    for one in answer.plans:
        assert one.plan.batch.microbatch == rows_of_each(one.plan, 16)
    state, step = colossax.boost(Tagger, OPTIMIZER, mean, answer.best)
    assert np.isfinite(step(state, batch())[1]["loss"])


def rows_of_each(plan, rows):
    return rows // Parts(abstract(plan, math.prod(plan.mesh.values()))).size(("data", "fsdp"))


@pytest.mark.slow
@pytest.mark.catches("plain-models-keep-nothing")
def test_what_a_plain_model_keeps_bounds_its_microbatches():
    """Each matmul's input and output of a token, counted by hand, and no more at once than fits."""
    rows = 4096
    subject = {"batch": batch(rows), "target": "h100:1x2", "pins": ("fsdp=2",), "top": 1}
    (whole,) = planned(**subject).plans
    each = 32 + 3 * 32 + 4 * (8 + 32) + (32 + 64) + (64 + 32) + (32 + 8)
    kept = whole.candidate.predicted.bytes.kept
    # Scores of attention and what they multiply: between all tokens of a row, for each of 4 heads.
    assert kept == pytest.approx(4 * rows / 2 * 32 * each, rel=0.5)
    assert kept > 4 * rows / 2 * 32 * each / 2
    (fewer,) = planned(**subject, device_gb=0.4 * whole.total_bytes / 1e9).plans
    assert fewer.plan.batch.microbatch <= rows / 4
    assert fewer.total_bytes <= 0.4 * whole.total_bytes


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (lambda x, w: jax.nn.gelu(x @ w) @ w.T, 3 * (8 + 16) + 3 * (16 + 8) + 8 * 16 + 16 * 8),
        (lambda x, w: jax.checkpoint(lambda y: jax.nn.gelu(y @ w) @ w.T)(x), 3 * 8 + 8 * 16),
        (lambda x, w: jax.lax.scan(lambda c, _: (c @ w @ w.T, None), x, length=5)[0], None),
        (lambda x, w: jnp.tanh(x), 0),
    ],
)
def test_kept_bytes_are_those_around_matmuls(function, numbers):
    jaxpr = jax.make_jaxpr(function)(jnp.ones((3, 8)), jnp.ones((8, 16))).jaxpr
    if numbers is None:  # what a scan reads and writes, five times
        numbers = 5 * (3 * (8 + 16 + 8) + 8 * 16 + 16 * 8)
    assert kept_bytes_of(jaxpr) == 4 * numbers


def test_names_of_dims_that_are_given_are_searched_by():
    mine = {r"up/kernel$": ("mlp", "embed"), r"down/kernel$": (None, None)}
    answer = planned(dims=mine, pins=("fsdp=8", "embed=fsdp"))
    plain = planned(pins=("fsdp=8", "embed=fsdp"))
    # What is not split any more lies whole on each device: in float32, with two moments.
    more = 3 * 4 * 64 * 32 * (1 - 1 / 8)
    found = [one.plans[0].candidate.predicted.bytes.states for one in (answer, plain)]
    assert found[0] - found[1] == pytest.approx(more)


def test_shapes_do_for_a_batch():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}
    assert planned(batch=shapes).best == planned().best


@pytest.mark.slow
def test_what_is_given_stays():
    given = colossax.Plan(precision=colossax.config.Precision(compute="bfloat16"))
    assert planned(given=given).best.precision == given.precision
    axes = {axis for one in planned(forbidden=("data",)).plans for axis in one.plan.mesh}
    assert axes <= {"fsdp", "tensor"}


@pytest.mark.catches("arguments-unchecked")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {}}, "plan: batch is a dict of other things than arrays"),
        ({"batch": {"words": 3}}, "plan: batch is a dict of other things than arrays"),
        ({"shapes": batch()}, "plan: shapes is no option here; the batch says"),
        ({"clip": 1.0}, "plan: no option is called 'clip'"),
        ({"target": "h100"}, "target 'h100': write GPU:NODESxGPUS"),
        ({"pins": ("tenso=2",)}, "--pin: 'tenso' is no mesh axis that is searched"),
        ({"dims": {r"^nothing": ("embed",)}}, "nothing"),
    ],
)
def test_refusals_name_what_was_meant(changes, said):
    with pytest.raises(InputError, match=said):
        planned(**changes)


def test_the_order_of_arguments_is_told():
    with pytest.raises(InputError, match=r": plan\(make_model, loss, optimizer, batch, target\)"):
        check_arguments(Tagger, OPTIMIZER, OPTIMIZER, "plan")
    with pytest.raises(InputError, match=r"as plan\(make_model, loss, optax.adamw\(3\), batch, t"):
        check_arguments(Tagger, 3, total, "plan")


def test_a_model_that_is_built_already_is_refused():
    with pytest.raises(InputError, match=r"plan: make_model is a Tagger that is built already"):
        colossax.plan(Tagger(nnx.Rngs(0)), total, OPTIMIZER, batch(), "h100:1x8")


def test_layers_in_host_memory_are_refused_where_none_may_be_used():
    given = colossax.Plan(offload=dataclasses.replace(colossax.Plan().offload, optimizer=1.0))
    with pytest.raises(PlanError, match="or --plan.offload none"):
        planned(given=given)


class Shifted(nnx.Module):
    """A layer that is told what all layers share."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("embed", "mlp"))
        self.up = nnx.Linear(16, 16, kernel_init=init, use_bias=False, rngs=rngs)

    def __call__(self, x, side, state):
        return x + jnp.tanh(self.up(x)) * side, state, {}


class Shared(nnx.Module):
    """What layers share is learned, or is not."""

    def __init__(self, rngs, *, learned):
        self.layers, self.learned = LayerStack(Shifted, 4, rngs=rngs), learned
        self.scale = nnx.Param(jnp.ones((16,)))

    def __call__(self, x):
        side = self.scale[...] if self.learned else jnp.ones((16,))
        return self.layers(x, side).carry + self.scale[...]


@pytest.mark.catches("layers-that-are-mapped-are-not-planned")
def test_a_loss_that_maps_what_calls_layers_is_planned_but_for_stages():
    def squares(model, batch):
        error = jax.vmap(model)(batch["x"]) - 1
        return {"error": (jnp.sum(error**2), jnp.float32(error.size), 1.0)}, {}

    answer = planned_shared(squares, (64, 2, 16), ("batch", None, "embed"), top=20)
    assert all("stage" not in one.plan.mesh for one in answer.plans)


def planned_shared(loss, shape, dims, **changes):
    """Of `Shared`, whose layers learn nothing that they share."""
    shapes = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    given = {"verify": False, "batch_dims": {"x": dims}, **changes}
    make = functools.partial(Shared, learned=False)
    return colossax.plan(make, loss, optax.sgd(0.1), shapes, "h100:1x8", **given)


@pytest.mark.catches("layers-in-a-loop-count-once")
def test_layers_that_a_loss_runs_three_times_are_counted_three_times():
    def compute(times):
        def squares(model, batch):
            x, _ = jax.lax.scan(lambda x, _: (model(x), None), batch["x"], length=times)
            return {"error": (jnp.sum(x**2), jnp.float32(x.size), 1.0)}, {}

        answer = planned_shared(squares, (64, 16), ("batch", "embed"), pins=("data=8",))
        return answer.plans[0].seconds.compute

    # Of one run layers are computed again in backward, as the plan says; two more take 3 passes.
    assert compute(3) == pytest.approx((4 + 2 * 3) / 4 * compute(1))


@pytest.mark.catches("stages-for-every-loss")
@pytest.mark.parametrize("learned", [True, False])
def test_stages_are_planned_where_the_loss_can_be_cut(learned):
    def squares(model, batch):
        error = model(batch["x"]) - 1
        return {"error": (jnp.sum(error**2), jnp.float32(error.size), 1.0)}, {}

    def planned_with(*pins):
        shapes = {"x": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
        make = functools.partial(Shared, learned=learned)
        return colossax.plan(
            make, squares, optax.sgd(0.1), shapes, "h100:1x8", pins=pins, verify=False
        )

    if not learned:
        assert planned_with("stage=2").best.mesh["stage"] == 2
        return
    assert all("stage" not in one.plan.mesh for one in planned_with().plans)
    with pytest.raises(PlanError, match="2 stages cannot share this model's layers in one program"):
        planned_with("stage=2")
