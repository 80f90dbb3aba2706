"""Attention under a plan equals attention on one device, gradients included."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from colossax.config import AttentionConfig, preset
from colossax.errors import PlanError
from colossax.pallas.attention import Mask, xla
from colossax.pallas.attention import attention as local_attention
from colossax.sharding import attention, use
from tests.cases import quick_first
from tests.oracle import assert_trees_close

MESHES = [{"fsdp": 8}, {"data": 2, "tensor": 4}, {"tensor": 8}, {"fsdp": 4, "tensor": 2}]


def inputs(kv_heads, heads=8, rows=8, seq=12, size=8):
    keys = jax.random.split(jax.random.key(kv_heads), 4)
    q = jax.random.normal(keys[0], (rows, seq, heads, size)) * 2
    k = jax.random.normal(keys[1], (rows, seq, kv_heads, size)) * 2
    v = jax.random.normal(keys[2], (rows, seq, kv_heads, size))
    segments = jnp.cumsum(jax.random.uniform(keys[3], (rows, seq)) < 0.2, axis=1)
    return q, k, v, segments.astype(jnp.int32)


@pytest.mark.parametrize(
    ("kv_heads", "mesh"), quick_first(itertools.product([8, 4, 2, 1], MESHES), 3), ids=str
)
def test_equals_one_device_with_few_or_many_kv_heads(devices, mesh, kv_heads):
    q, k, v, segments = inputs(kv_heads)
    mask = Mask(causal=True, window=(6, 0), q_segments=segments, kv_segments=segments)
    scale = jnp.arange(q.size).reshape(q.shape) / q.size

    def loss(through, q, k, v):
        return jnp.sum(through(q, k, v, mask=mask) * scale)

    want = jax.grad(lambda *a: loss(local_attention, *a), (0, 1, 2))(q, k, v)
    with use(preset("zero3+megatron", mesh=mesh).bind(devices)):
        got = jax.jit(jax.grad(lambda *a: loss(attention, *a), (0, 1, 2)))(q, k, v)
    assert_trees_close(got, want)


def test_slopes_lse_and_shared_masks(devices):
    q, k, v, _ = inputs(4)
    slopes = 2.0 ** -jnp.arange(1, 9)
    mask = Mask(causal=True)
    want = local_attention(q, k, v, mask=mask, alibi_slopes=slopes, return_lse=True)
    with use(preset("zero3+megatron", mesh={"fsdp": 2, "tensor": 4}).bind(devices)):
        got = jax.jit(
            lambda q, k, v: attention(q, k, v, mask=mask, alibi_slopes=slopes, return_lse=True)
        )(q, k, v)
    assert_trees_close(got, want)


def test_biases_of_one_row_or_one_head_are_shared(devices, monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    q, k, v, _ = inputs(8)
    bias = jax.random.normal(jax.random.key(9), (1, 8, 12, 12))
    shared = jax.random.normal(jax.random.key(8), (8, 1, 12, 12))
    plan = preset(
        "zero3+megatron",
        mesh={"fsdp": 2, "tensor": 4},
        attention=AttentionConfig(kernel="xla"),
    )

    def loss(through, bias, shared, **options):
        out = through(q, k, v, mask=Mask(causal=True), biases=(bias, shared), **options)
        return jnp.sum(jnp.square(out))

    want = jax.grad(lambda a, b: loss(local_attention, a, b, implementation="reference"), (0, 1))(
        bias, shared
    )
    with use(plan.bind(devices)):
        got = jax.jit(jax.grad(lambda a, b: loss(attention, a, b), (0, 1)))(bias, shared)
    assert_trees_close(got, want)


def test_heads_that_the_axis_does_not_divide_are_refused(devices):
    q, k, v, _ = inputs(3, heads=6)
    with use(preset("megatron", mesh={"tensor": 8}).bind(devices)):
        with pytest.raises(PlanError, match="attention q: dim 'heads' has size 6"):
            attention(q, k, v, mask=Mask(causal=True))


def test_a_kernel_that_cannot_serve_is_refused_not_replaced(devices):
    q, k, v, _ = inputs(4)
    plan = preset("zero3", mesh={"fsdp": 8}, attention=AttentionConfig(kernel="cudnn"))
    with use(plan.bind(devices)), pytest.raises(PlanError, match="plan.attention.kernel: .*cudnn"):
        attention(q, k, v, mask=Mask(causal=True))


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(6, 3, 2), (12, 6, 4), (8, 4, 2)])
def test_kv_heads_mapped_to_none_are_right_whether_or_not_groups_line_up(
    devices, heads, kv_heads, tensor
):
    q, k, v, _ = inputs(kv_heads, heads=heads)
    plan = preset("megatron", mesh={"tensor": tensor, "fsdp": 8 // tensor})
    rules = plan.rules.updated(activations={"kv_heads": None})

    def loss(through, q, k, v):
        return jnp.sum(jnp.sin(through(q, k, v, mask=Mask(causal=True)) * 3))

    want = jax.grad(lambda *a: loss(local_attention, *a), (0, 1, 2))(q, k, v)
    with use(plan.replace(rules=rules).bind(devices)):
        got = jax.jit(jax.grad(lambda *a: loss(attention, *a), (0, 1, 2)))(q, k, v)
    assert_trees_close(got, want)
