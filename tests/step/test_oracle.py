"""Sharded equals one device: loss, every clipped gradient, then three steps of AdamW and of LAMB
by their losses and by the parameters they lead to.

Every factorisation of eight devices over data, fsdp and tensor, with and without accumulation, for
three model shapes. Each factorisation meets each shape here once, with or without accumulation by
turns; the other half runs with `-m sweep`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.config import BatchConfig, Plan, Precision, Segment, preset
from colossax.models import GPT2Config, LlamaConfig, Qwen3Config, maker
from colossax.optim import adamw, lamb
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.oracle import assert_losses_close, assert_trees_close, factorisations
from tests.step.test_step import text_batch

SHAPES = {
    "deep": LlamaConfig(vocab=64, embed=32, layers=4, heads=8, kv_heads=4, mlp=48, max_seq=32),
    "llama": LlamaConfig(vocab=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=48, max_seq=32),
    "gpt2": GPT2Config(vocab=64, embed=32, layers=2, heads=8, mlp=64, max_seq=32),
    "qwen3": Qwen3Config(
        vocab=64, embed=32, layers=2, heads=8, kv_heads=2, head_dim=8, mlp=40, max_seq=32
    ),
}
BATCH = text_batch(rows=16)
MESHES = factorisations(8, ("data", "fsdp", "tensor"))
PRESETS = ("zero3+megatron", "zero1+megatron_sp", "zero3+megatron_sp", "ddp+megatron")


STEPS = 3
CLIP = 0.5
"""Below the gradients' norm, so that every case clips."""


def both_optimizers(dims):
    """AdamW for the first three steps, LAMB for the next three; remembers the last gradients.

    One program then runs both, which halves what this file spends in the compiler.
    """
    parts = (adamw(1e-2, eps=1e-5)(dims), lamb(1e-2)(dims))

    def init(params):
        states = tuple(part.init(params) for part in parts)
        return {
            "states": states,
            "count": jnp.int32(0),
            "grads": jax.tree.map(jnp.zeros_like, params),
        }

    def update(grads, state, params):
        def through(at):
            def branch():
                updates, new = parts[at].update(grads, state["states"][at], params)
                return updates, (*state["states"][:at], new, *state["states"][at + 1 :])

            return branch

        updates, states = jax.lax.cond(state["count"] < STEPS, through(0), through(1))
        return updates, {"states": states, "count": state["count"] + 1, "grads": grads}

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Found:
    """Clipped gradients at the start; losses and final parameters of three steps by optimizer.

    Trees are `{path: [layers, ...]}`, whatever the segments.
    """

    grads: dict
    losses: dict
    params: dict


def run(shape, plan, devices):
    """Three steps of each optimizer, both from the same start."""
    step = build_step(
        maker(SHAPES[shape]),
        both_optimizers,
        next_token_loss(z_loss=1e-3),
        plan,
        devices=devices,
        clip_norm=CLIP,
    )
    params = fresh_state(SHAPES[shape], step)["params"]
    params = jax.tree.map(_stirred, params, step.spec.infos, step.shardings["params"])
    state = step.init_from(params)

    @jax.jit
    def program(state, batch):
        start = state["params"]

        def body(state, at):
            params = jax.tree.map(lambda a, b: jnp.where(at == STEPS, a, b), start, state["params"])
            state, metrics = step.pure({**state, "params": params}, batch)
            return state, (metrics, state["opt_state"]["grads"], state["params"])

        _, (metrics, grads, params) = jax.lax.scan(body, state, jnp.arange(2 * STEPS))
        first = jax.tree.map(lambda g: g[0], grads)
        ends = [jax.tree.map(lambda p, at=at: p[at], params) for at in (STEPS - 1, 2 * STEPS - 1)]
        return first, ends, metrics

    grads, ends, metrics = jax.tree.map(np.asarray, program(state, step.place(BATCH)))
    losses = metrics["loss"]
    assert losses[0] == losses[STEPS]
    assert metrics["grad_norm"][0] > CLIP
    after = (_by_path(step.spec.infos, end) for end in ends)
    return Found(
        grads=_by_path(step.spec.infos, grads),
        losses={"adamw": losses[:STEPS], "lamb": losses[STEPS:]},
        params=dict(zip(("adamw", "lamb"), after, strict=True)),
    )


def _by_path(infos, tree):
    parts = {}
    pairs = zip(jax.tree.leaves(infos), jax.tree.leaves(tree), strict=True)
    for info, leaf in sorted(pairs, key=lambda pair: pair[0].first_layer or 0):
        whole = leaf if info.stacked or info.first_layer is None else leaf[None]
        parts.setdefault(info.path, []).append(whole)
    return {path: np.concatenate(leaves) for path, leaves in parts.items()}


def _stirred(leaf, info, sharding):
    """Norms and biases away from one and zero, so that every path of the gradient matters.

    The noise of a layer does not depend on the segment that holds it.
    """
    own = info.shape[1:] if info.stacked else info.shape
    layers = range(info.first_layer, info.first_layer + info.layer_count) if info.stacked else [0]
    first = layers[0] if info.stacked else info.first_layer or 0
    noise = [
        np.random.default_rng((*info.path.encode(), first + at)).normal(size=own) * 0.05
        for at in range(len(layers))
    ]
    noise = np.stack(noise) if info.stacked else noise[0]
    return jax.device_put(np.asarray(leaf) + noise.astype(np.float32), sharding)


@functools.cache
def truth(shape):
    return run(shape, Plan(mesh={"fsdp": 1}), jax.devices()[:1])


def assert_equals_one_device(found, shape):
    want = truth(shape)
    assert_trees_close(found.grads, want.grads)
    for name, losses in want.losses.items():
        assert_losses_close(found.losses[name], losses)
        # Softmax leaves key biases free: their gradient is rounding, which Adam makes a whole step.
        # Elsewhere Adam divides a gradient's error (1e-5 of the largest) by the element's own size:
        # after three steps of 1e-2 it is at most 1e-3 of the way, 1e-4 of the largest parameter.
        bound = {path for path in want.params[name] if not path.endswith("attn/k/b")}
        got, right = (
            {path: tree[path] for path in bound} for tree in (found.params[name], want.params[name])
        )
        assert_trees_close(got, right, tolerance=1e-4)


def cases():
    for shape_at, shape in enumerate(("llama", "gpt2", "qwen3")):
        for at, mesh in enumerate(MESHES):
            for pieces in (1, 2):
                plan = preset(
                    PRESETS[(at // 2 + shape_at) % len(PRESETS)],
                    mesh=mesh,
                    batch=BatchConfig(accumulation=pieces),
                )
                label = "-".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)
                quick = at % 2 == shape_at % 2 and pieces == 1 + at // 2 % 2
                marks = [] if quick else [pytest.mark.sweep]
                yield pytest.param(shape, plan, id=f"{shape}-{label}-x{pieces}", marks=marks)


def test_a_quick_run_sees_every_preset_mesh_and_both_numbers_of_microbatches():
    quick = [case.values[1] for case in cases() if not case.marks]
    assert {plan.mesh for plan in quick} == {plan.mesh for plan in (c.values[1] for c in cases())}
    assert {plan.batch.accumulation for plan in quick} == {1, 2}
    for name in PRESETS:
        assert any(plan == preset(name, mesh=plan.mesh, batch=plan.batch) for plan in quick), name


@pytest.mark.sentinel("llama-data2-tensor4-x1")
@pytest.mark.parametrize(("shape", "plan"), list(cases()))
def test_every_mesh_equals_one_device(devices, shape, plan, capfd):
    assert_equals_one_device(run(shape, plan, devices), shape)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("remat", ["full", "dots", "qkv+attention"])
def test_segments_and_remat_equal_one_device(devices, remat):
    plan = preset(
        "zero3+megatron_sp",
        mesh={"fsdp": 2, "tensor": 4},
        segments=(Segment(count=1), Segment(remat=remat)),
    )
    assert_equals_one_device(run("deep", plan, devices), "deep")


def test_bf16_compute_is_within_its_rounding(devices):
    plan = preset(
        "zero3+megatron",
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        precision=Precision(compute="bfloat16"),
        batch=BatchConfig(accumulation=2),
    )
    found, want = run("llama", plan, devices), truth("llama")
    assert_trees_close(found.grads, want.grads, tolerance=2e-2)
    assert_losses_close(found.losses["adamw"], want.losses["adamw"], tolerance=2e-2)
    assert not np.array_equal(found.losses["adamw"], want.losses["adamw"])


def test_three_steps_move_the_loss_far_more_than_the_tolerance():
    """The comparison above would be empty if the optimizers hardly moved."""
    for losses in truth("llama").losses.values():
        assert np.ptp(losses) > 1e-2
