"""The step: weighting, accumulation, skipping, filters, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import (
    AttentionConfig,
    BatchConfig,
    LossConfig,
    Plan,
    Precision,
    Segment,
    preset,
)
from colossax.errors import InputError, PlanError
from colossax.models import LlamaConfig, maker
from colossax.nn import LayerStack, param
from colossax.planner import boost, build_step
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.oracle import assert_losses_close, assert_trees_close

CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=32)
ONE = Plan(mesh={"fsdp": 1})


def text_batch(rows=8, seq=16, vocab=64, seed=0):
    """Packed rows whose share of real targets goes from none to all."""
    rng = np.random.default_rng(seed)
    share = np.linspace(0, 1, rows)[:, None] ** 2
    segments = np.cumsum(rng.random((rows, seq)) < 0.2, axis=1)
    starts = np.maximum.accumulate(
        np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(seq), 0), axis=1
    )
    return {
        "tokens": rng.integers(0, vocab, (rows, seq)).astype(np.int32),
        "targets": rng.integers(0, vocab, (rows, seq)).astype(np.int32),
        "segments": segments.astype(np.int32),
        "positions": (np.arange(seq) - starts).astype(np.int32),
        "weights": (rng.random((rows, seq)) < share).astype(np.float32),
    }


def started(plan, optimizer=None, loss=None, *, devices, **options):
    """(state, step) of the small model."""
    step = build_step(
        maker(CONFIG),
        optimizer or optax.sgd(1.0),
        loss or next_token_loss(),
        plan,
        devices=devices,
        **options,
    )
    return fresh_state(CONFIG, step), step


def one_device(optimizer=None, loss=None, plan=ONE, **options):
    loss = loss or next_token_loss(z_loss=1e-3)
    return started(plan, optimizer, loss, devices=jax.devices()[:1], **options)


@functools.cache
def ordinary_step():
    return one_device()[1]


def ordinary():
    """`one_device()` with a step that several tests share, so that it is compiled once."""
    return fresh_state(CONFIG, ordinary_step()), ordinary_step()


def gradients(plan, batch, loss=None):
    state, step = one_device(plan=plan, loss=loss)
    found = jax.jit(step.gradients)(state, batch)
    weights = {name: float(weight) for name, (_, weight) in found.totals.items()}
    return found.grads, float(found.loss), weights


@functools.cache
def truth(rows=8):
    """Of the plain plan."""
    return gradients(ONE, text_batch(rows=rows))


@pytest.mark.parametrize("pieces", [4, 8])
def test_accumulation_equals_the_whole_batch_whatever_tokens_a_microbatch_has(pieces):
    batch = text_batch()
    want, loss, weights = truth()
    plan = ONE.replace(batch=BatchConfig(accumulation=pieces))
    got, other_loss, other_weights = gradients(plan, batch)
    assert_trees_close(got, want)
    assert_losses_close(other_loss, loss)
    assert weights == other_weights
    assert weights["cross_entropy"] == batch["weights"].sum()


@pytest.mark.sentinel
@pytest.mark.catches("microbatch-weight")
def test_each_term_is_divided_by_its_own_weight():
    """Two terms with different masks over uneven microbatches: one common weight is far off."""
    batch = text_batch()
    batch["other"] = (np.random.default_rng(3).random((8, 16)) < 0.3).astype(np.float32)

    def loss(model, batch):
        logits = model(batch["tokens"], segments=batch["segments"])
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        size = jnp.mean(jnp.square(logits), axis=-1)
        first, second = batch["weights"], batch["other"]
        return {
            "ce": (jnp.sum(ce * first), first.sum(), 1.0),
            "size": (jnp.sum(size * second), second.sum(), 0.5),
        }, {}

    want, value, weights = gradients(ONE, batch, loss)
    got, again, _ = gradients(ONE.replace(batch=BatchConfig(accumulation=4)), batch, loss)
    assert_trees_close(got, want)
    assert_losses_close(again, value)
    assert weights == {"ce": batch["weights"].sum(), "size": batch["other"].sum()}


@pytest.mark.catches("inputs-used")
@pytest.mark.catches("weight-depends-on-parameters")
def test_a_weight_that_depends_on_parameters_is_refused():
    def loss(model, batch):
        logits = model(batch["tokens"])
        weight = jnp.sum(jax.nn.softmax(logits) > 0.01)
        return {"ce": (jnp.sum(logits), weight, 1.0)}, {}

    state, step = one_device(loss=loss)
    with pytest.raises(InputError, match="weight of a term depends on parameters"):
        step(state, text_batch())


@pytest.mark.parametrize("result", [1.0, ({"ce": 1.0},), None])
def test_a_loss_of_another_form_is_refused(result):
    state, step = one_device(loss=lambda model, batch: result)
    with pytest.raises(InputError, match="loss: expected"):
        step(state, text_batch())


@pytest.mark.sentinel
@pytest.mark.catches("clip-by-half")
def test_clipping_is_by_the_global_norm():
    """Under plain SGD of rate 1000 the parameters' change is the clipped gradient."""
    batch = text_batch()
    grads = jax.tree.map(np.asarray, truth()[0])
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    state, step = one_device(optax.sgd(1000.0), clip_norm=float(norm) / 4)
    start = jax.tree.map(np.asarray, state["params"])
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 1000, start, state["params"])
    assert_trees_close(moved, jax.tree.map(lambda g: g / 4, grads), tolerance=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    def loss(model, batch):
        terms, metrics = next_token_loss()(model, batch)
        total, weight, one = terms["cross_entropy"]
        return {"cross_entropy": (total * batch["scale"][0], weight, one)}, metrics

    state, step = one_device(optax.adamw(1e-2), loss)
    batch = {**text_batch(), "scale": np.ones(8, np.float32)}
    state, _ = step(state, batch)
    kept = jax.tree.map(np.asarray, (state["params"], state["opt_state"]))
    state, metrics = step(state, {**batch, "scale": np.full(8, np.nan, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, (state["params"], state["opt_state"]), kept)
    assert float(metrics["skipped"]) == 1
    assert int(state["step"]) == 2
    state, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 1
    assert np.isfinite(float(metrics["loss"]))


def head_loss(extra):
    """A loss of the head alone, which compiles in no time: its mean square and `extra`."""

    def loss(model, batch, key):
        head = model.head_weight()
        total = jnp.sum(jnp.square(head)) + extra(head, batch)
        return {"head": (total, jnp.float32(head.size), 1.0)}, drawn(batch, key)

    return loss


def drawn(batch, key):
    """A random number of each microbatch, and its square, of those that are `seen`."""
    number, seen = jax.random.uniform(key), batch["seen"][0]
    return {"number": (number * seen, seen), "square": (number**2 * seen, seen)}


def steep(head, batch):
    """Zero, with a gradient that is the square of the batch's number."""
    slope = batch["slope"][0]
    return jnp.sum(head - jax.lax.stop_gradient(head)) * slope * slope


@pytest.mark.catches("gradient-norm-infinite")
@pytest.mark.catches("skipped-step-changes-variables")
def test_an_infinite_gradient_of_a_finite_loss_is_skipped_by_parameters_and_variables():
    state, step = one_device(
        optax.adamw(1e-2),
        head_loss(steep),
        variables={"count": jnp.float32(0)},
        after_step=lambda variables, sums: {"count": variables["count"] + 1},
    )
    batch = {name: np.ones(8, np.float32) for name in ("seen", "slope")}
    state, _ = step(state, batch)
    changing = ("params", "opt_state", "variables")
    kept = jax.tree.map(np.asarray, {name: state[name] for name in changing})
    state, metrics = step(state, {**batch, "slope": np.full(8, 1e30, np.float32)})
    assert np.isfinite(float(metrics["loss"])) and np.isinf(float(metrics["grad_norm"]))
    assert float(metrics["skipped"]) == 1
    found = {name: state[name] for name in changing}
    jax.tree.map(np.testing.assert_array_equal, found, kept)
    assert float(found["variables"]["count"]) == 1


@pytest.mark.sentinel
@pytest.mark.catches("reduce-once-one-key")
def test_each_device_draws_random_numbers_of_its_own_where_gradients_are_reduced_once(devices):
    plan = preset("zero1", mesh={"fsdp": 4}, batch=BatchConfig(accumulation=2, reduce_once=True))
    loss = head_loss(lambda head, batch: 0.0)
    state, step = boost(maker(CONFIG), optax.sgd(1.0), loss, plan, devices=devices[:4])
    # Of two microbatches the first, whose rows are 0, 2, ...: one number of each device.
    _, metrics = step(state, {"seen": np.arange(8, dtype=np.float32) % 2 == 0})
    variance = float(metrics["square"]) - float(metrics["number"]) ** 2
    assert variance > 1e-3


@pytest.mark.catches("frozen-parameters-learn")
def test_frozen_parameters_get_no_gradient_and_no_state():
    def trainable(info):
        return info.path.startswith("layers/mlp/")

    state, step = one_device(optax.adamw(1e-2), trainable=trainable)
    before = jax.tree.map(np.asarray, state["params"])
    assert len(jax.tree.leaves(state["opt_state"][0].mu)) == 3  # gate, up, down
    state, _ = step(state, text_batch())
    moved = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, state["params"])
    infos = jax.tree.leaves(step.spec.infos)
    for info, changed in zip(infos, jax.tree.leaves(moved), strict=True):
        assert changed == trainable(info), info.path


def test_variables_change_after_a_step_outside_differentiation():
    def after(variables, sums):
        return {"seen": variables["seen"] + sums["accuracy"][1]}

    batch = text_batch()
    state, step = one_device(variables={"seen": jnp.float32(0)}, after_step=after)
    state, _ = step(state, batch)
    state, _ = step(state, batch)
    assert float(state["variables"]["seen"]) == 2 * batch["weights"].sum()


def test_the_step_composes_in_a_jit_of_the_users_own():
    batch = text_batch()
    state, step = one_device(optax.adamw(1e-2))
    placed = step.place(batch)

    @jax.jit
    def two(state):
        state, _ = step.pure(state, placed)
        return step.pure(state, placed)

    _, metrics = two(state)
    state, _ = step(state, batch)
    _, again = step(state, batch)
    assert_losses_close(metrics["loss"], again["loss"])


@pytest.mark.sentinel
@pytest.mark.catches("state-not-donated")
def test_the_state_is_donated():
    state, step = ordinary()
    step(state, text_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.catches("given-up-state")
def test_a_state_given_up_is_refused_and_the_one_that_follows_goes_on():
    old, step = ordinary()
    state, _ = step(old, text_batch())
    for again in (step, step.evaluate):
        with pytest.raises(InputError, match="given up to an earlier call"):
            again(old, text_batch())
    step(state, text_batch())


@pytest.mark.catches("batch-form-changes")
def test_another_batch_shape_is_refused_not_compiled():
    state, step = ordinary()
    state, _ = step(state, text_batch())
    with pytest.raises(InputError, match="differs from what the step was compiled for"):
        step(state, text_batch(rows=4))


def test_another_batch_dtype_is_refused_not_compiled():
    state, step = ordinary()
    state, _ = step(state, text_batch())
    wide = {**text_batch(), "weights": text_batch()["weights"].astype(np.float64)}
    state, _ = step(state, wide)  # float64 becomes float32, as everywhere in JAX
    other = {**text_batch(), "weights": text_batch()["weights"].astype(np.int32)}
    with pytest.raises(InputError, match="differs from what the step was compiled for"):
        step(state, other)


@pytest.mark.catches("padding-inside-document")
def test_documents_out_of_their_order_are_refused():
    _, step = ordinary()
    batch = text_batch()
    batch["segments"][3] = [0] * 4 + [2] * 4 + [-1] * 2 + [1] * 6
    with pytest.raises(InputError, match=r"row \[3\] has segment 1 behind segment 2, at token 10"):
        step.place(batch)
    batch["segments"][3] = [0] * 4 + [2] * 4 + [-1] * 2 + [2] * 6
    with pytest.raises(InputError, match=r"\[3\] has padding inside segment 2, before token 10"):
        step.place(batch)
    batch["segments"][3] = [-1] * 2 + [0] * 2 + [-1] * 4 + [2] * 2 + [3] * 2 + [-1] * 4
    step.place(batch)


def test_a_batch_array_without_a_batch_dim_is_refused():
    state, step = ordinary()
    with pytest.raises(InputError, match="batch 'scale': shape .* needs a dim 'batch'"):
        step(state, {**text_batch(), "scale": np.float32(1.0)})


def test_batch_dims_of_another_rank_are_refused():
    state, step = one_device(batch_dims={"extra": ("batch", "seq")})
    with pytest.raises(InputError, match="batch 'extra': shape .8,. does not fit"):
        step(state, {**text_batch(), "extra": np.ones(8, np.float32)})


def test_weights_per_row_need_no_declaration():
    """`weights` are `[batch, seq]` in text; a loss of one's own may have one for each row."""

    def loss(model, batch):
        ce = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["tokens"]), batch["targets"]
        )
        weight = jnp.sum(batch["weights"]) * ce.shape[1]
        return {"ce": (jnp.sum(ce * batch["weights"][:, None]), weight, 1.0)}, {}

    batch = {**text_batch(), "weights": np.arange(8, dtype=np.float32)}
    want, value, _ = gradients(ONE, batch, loss)
    got, again, _ = gradients(ONE.replace(batch=BatchConfig(accumulation=4)), batch, loss)
    assert_trees_close(got, want)
    assert_losses_close(again, value)


def test_a_batch_that_devices_and_microbatches_do_not_divide_is_refused(devices):
    plan = preset("zero3", mesh={"fsdp": 8}, batch=BatchConfig(accumulation=3))
    step = build_step(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=devices)
    with pytest.raises(PlanError, match="8 rows cannot be cut into 3 microbatches for 8 devices"):
        step.place(text_batch())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("zero1", {"fsdp": 8}),
        ("zero1+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("ddp", {"data": 4, "fsdp": 2}),
    ],
)
def test_gradients_reduced_once_equal_those_of_one_device(devices, name, mesh):
    batch = text_batch(rows=16)
    want, loss, weights = truth(rows=16)
    plan = preset(name, mesh=mesh, batch=BatchConfig(accumulation=2))
    assert plan.batch.reduce_once == name.startswith("zero1")
    plan = plan.replace(batch=BatchConfig(accumulation=2, reduce_once=True))
    state, step = started(plan, loss=next_token_loss(z_loss=1e-3), devices=devices)
    got = jax.jit(step.gradients)(state, step.place(batch))
    assert_trees_close(got.grads, want)
    assert_losses_close(got.loss, loss)
    assert float(got.totals["cross_entropy"][1]) == weights["cross_entropy"]


@pytest.mark.parametrize(("scheme", "sends"), [("ring", "ppermute"), ("all_gather", "all_gather")])
def test_gradients_reduced_once_keep_the_scheme_of_attention(devices, scheme, sends):
    plan = preset("zero1", mesh={"fsdp": 2, "ring": 4}, batch=BatchConfig(accumulation=2))
    plan = plan.replace(attention=AttentionConfig(scheme=scheme))
    step = build_step(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=devices)
    batch = step.place(text_batch(rows=4))
    program = str(jax.make_jaxpr(step.gradients)(step.abstract, batch))
    assert sends in program
    assert ("ppermute" in program) == (scheme == "ring")


def test_cudnn_cannot_be_asked_for_where_gradients_are_reduced_once(devices):
    plan = preset("zero1", mesh={"fsdp": 8}, batch=BatchConfig(accumulation=2)).replace(
        attention=AttentionConfig(kernel="cudnn")
    )
    with pytest.raises(PlanError, match="'cudnn' cannot run under plan.batch.reduce_once"):
        build_step(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=devices)


def test_split_parameters_cannot_be_reduced_once(devices):
    plan = preset("zero3", mesh={"fsdp": 8}).replace(
        batch=BatchConfig(accumulation=2, reduce_once=True)
    )
    with pytest.raises(PlanError, match="reduce_once: .* is split over 'fsdp'"):
        build_step(maker(CONFIG), optax.sgd(1.0), next_token_loss(), plan, devices=devices)


def test_a_microbatch_of_rows_equals_that_many_pieces(devices):
    batch = text_batch(rows=16)
    plan = preset("zero3", mesh={"fsdp": 4})
    found = [
        gradients_on(devices[:4], plan.replace(batch=config), batch)
        for config in (BatchConfig(accumulation=4), BatchConfig(microbatch=1))
    ]
    assert_trees_close(found[1], found[0], tolerance=0)
    step = build_step(
        maker(CONFIG),
        optax.sgd(1.0),
        next_token_loss(),
        plan.replace(batch=BatchConfig(microbatch=3)),
        devices=devices[:4],
    )
    with pytest.raises(PlanError, match="16 rows cannot be cut into microbatches of 3 for each"):
        jax.eval_shape(step.gradients, step.abstract, step.place(batch))


def gradients_on(devices, plan, batch):
    state, step = started(plan, devices=devices)
    return jax.jit(step.gradients)(state, step.place(batch)).grads


def test_a_plan_that_does_not_fit_the_model_is_refused_before_anything_is_allocated(devices):
    before = len(jax.live_arrays())
    with pytest.raises(PlanError, match="layers/attn/o/w: dim 'heads' has size 4"):
        boost(
            maker(CONFIG),
            optax.sgd(1.0),
            next_token_loss(),
            preset("megatron", mesh={"tensor": 8}),
            devices=devices,
        )
    assert len(jax.live_arrays()) <= before  # others' may go meanwhile


def test_a_model_with_random_state_is_refused():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.w = param(jnp.ones((2, 2)), ("embed", "mlp"))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    with pytest.raises(InputError, match="a model may hold parameters alone"):
        build_step(Noisy, optax.sgd(1.0), next_token_loss(), Plan())

    class Stacked(nnx.Module):
        def __init__(self, rngs):
            self.layers = LayerStack(Noisy, 2, rngs=rngs)

    with pytest.raises(InputError, match="'drop/rngs/count' is a .*, and a layer may hold"):
        build_step(Stacked, optax.sgd(1.0), next_token_loss(), Plan())


def test_chunked_loss_equals_whole(devices):
    batch = text_batch()
    plan = preset("zero3+megatron", mesh={"fsdp": 4, "tensor": 2})
    losses = []
    for chunks in (1, 4):
        chunked = plan.replace(loss=LossConfig(vocab_chunks=chunks))
        state, step = started(chunked, loss=next_token_loss(z_loss=1e-3), devices=devices)
        state, first = step(state, batch)
        state, second = step(state, batch)
        losses.append([float(first["loss"]), float(second["loss"]), float(second["accuracy"])])
    assert_losses_close(losses[1], losses[0])


def test_bf16_compute_keeps_float32_master_parameters():
    batch = text_batch()
    state, step = ordinary()
    state, want = step(state, batch)
    plan = ONE.replace(precision=Precision(compute="bfloat16"))
    state, step = one_device(plan=plan)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["params"]))
    state, got = step(state, batch)
    assert_losses_close(got["loss"], want["loss"], tolerance=2e-2)
    assert_losses_close(got["grad_norm"], want["grad_norm"], tolerance=2e-2)
    assert float(got["loss"]) != float(want["loss"])


def test_evaluate_gives_totals_and_weights():
    batch = text_batch()
    state, step = ordinary()
    sums = step.evaluate(state, batch)
    total, weight = sums["cross_entropy"]
    _, metrics = step(state, batch)
    assert float(weight) == batch["weights"].sum()
    assert_losses_close(total / weight, metrics["cross_entropy"])


def test_evaluate_cuts_the_batch_as_a_step_does_and_gives_no_key():
    seen = []

    def loss(model, batch, key):
        seen.append((batch["tokens"].shape[0], key is None))
        return next_token_loss(z_loss=1e-3)(model, batch)

    state, whole = ordinary()
    want = whole.evaluate(state, text_batch())
    state, step = one_device(loss=loss, plan=ONE.replace(batch=BatchConfig(accumulation=4)))
    got = step.evaluate(state, text_batch())
    assert set(seen) == {(2, True)}
    for name in want:
        assert_losses_close(got[name], want[name])


def test_weight_gradients_keep_the_precision_of_their_reduction():
    plan = ONE.replace(precision=Precision(compute="bfloat16", reduction="float32"))
    layers = gradients(plan, text_batch())[0]["layers"]["segments"][0]
    for part in (layers["attn"]["q"]["w"], layers["mlp"]["down"]["w"]):
        rounded = part.astype(jnp.bfloat16).astype(jnp.float32)
        assert jnp.mean(rounded != part) > 0.9


def test_the_abstract_state_lowers_to_the_program_that_runs(devices):
    plan = preset("zero3+megatron", mesh={"fsdp": 4, "tensor": 2})
    state, step = started(plan, optax.adamw(1e-2), devices=devices)
    batch = step.place(text_batch())
    assert step.lower(step.abstract, batch).as_text() == step.lower(state, batch).as_text()


@pytest.mark.parametrize(
    ("term", "sentence"),
    [
        ((1.0, 2.0), "give .total, weight, coefficient."),
        ((np.ones(3), 2.0, 1.0), "'ce' has shape .3,. where one number belongs"),
    ],
)
def test_a_term_of_another_form_is_refused(term, sentence):
    state, step = one_device(loss=lambda model, batch: ({"ce": term}, {}))
    with pytest.raises(InputError, match=sentence):
        step(state, text_batch())


@pytest.mark.parametrize("name", ["loss", "tokens", "accuracy"])
def test_a_name_used_twice_is_refused(name):
    def loss(model, batch):
        terms, metrics = next_token_loss()(model, batch)
        return {name: terms["cross_entropy"]}, metrics

    state, step = one_device(loss=loss)
    with pytest.raises(InputError, match="a name of its own"):
        step(state, text_batch())


def test_masked_optimizers_work():
    parts = {"learn": optax.adamw(1e-2), "rest": optax.set_to_zero()}

    def labels(params):
        return jax.tree.map(lambda p: "learn" if p.ndim > 2 else "rest", params)

    def after(optimizer):
        state, step = one_device(optimizer)
        start = jax.tree.map(np.asarray, state["params"])
        return start, jax.tree.map(np.asarray, step(state, text_batch())[0]["params"])

    start, masked = after(optax.multi_transform(parts, labels))
    _, plain = after(parts["learn"])
    # AdamW knows each parameter by itself: those that learn move as if there were no others.
    wanted = jax.tree.map(
        lambda label, new, old: new if label == "learn" else old, labels(start), plain, start
    )
    assert_trees_close(masked, wanted, tolerance=1e-6)
    moved = {label for label, a, b in flat(labels(start), start, masked) if np.any(a != b)}
    still = {label for label, a, b in flat(labels(start), start, masked) if not np.any(a != b)}
    assert (moved, still) == ({"learn"}, {"rest"})


def flat(*trees):
    """Leaves of trees side by side."""
    return list(zip(*map(jax.tree.leaves, trees), strict=True))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_policy_keeps_gathered_weights(devices, remat):
    """Temporary memory then grows by a layer's share of the gradient, not by its whole weights."""
    config = dataclasses.replace(CONFIG, embed=64, mlp=256)

    def temp_bytes(layers):
        plan = preset("zero3", mesh={"fsdp": 8}, segments=(Segment(remat=remat),))
        make = maker(dataclasses.replace(config, layers=layers))
        step = build_step(make, optax.sgd(1.0), next_token_loss(), plan, devices=devices)
        compiled = step.lower(step.abstract, step.place(text_batch(seq=4))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    layer = 4 * (3 * 64 * 256 + 2 * 64 * 64 + 2 * 64 * 32)
    assert (temp_bytes(12) - temp_bytes(4)) / 8 < 0.3 * layer
