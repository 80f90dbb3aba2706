"""The forward kernel in the interpreter, races looked for, against float64; and who may use it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas import target
from colossax.pallas.attention import Mask, attend_block, attention, dense, row_ranges
from colossax.pallas.attention.api import choose
from colossax.pallas.attention.mosaic_gpu.forward import forward
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.target import Target
from tests.cases import quick_first
from tests.pallas.places import everywhere, no_races


def ids(*runs):
    """One row of segments from `(segment, length)`."""
    return jnp.asarray([sum(([segment] * length for segment, length in runs), [])], jnp.int32)


def places(*starts, length=64):
    """Positions of chunks of a longer row, as a rank of a ring holds them."""
    return jnp.concatenate([jnp.arange(x, x + length) for x in starts])[None].astype(jnp.int32)


PACKED = ids((-1, 5), (0, 70), (1, 53), (-1, 9), (3, 63))
# Queries, keys, heads, kv heads, mask; then what else differs.
CASES = {
    "full, s != t, lengths no tile divides": (70, 210, 2, 2, Mask(), {}),
    "head size 128, causal, grouped heads": (
        100,
        150,
        2,
        1,
        Mask(causal=True, q_positions=places(50, length=100)),
        {"h": 128},
    ),
    "causal, grouped heads": (128, 256, 4, 2, Mask(causal=True), {"b": 2, "h": 64}),
    "window: tiles with an end, whole, with an end": (
        128,
        384,
        1,
        1,
        Mask(causal=True, window=(290, 0), q_positions=places(260, length=128)),
        {"dtype": jnp.float16},
    ),
    "packed rows with padding": (
        200,
        200,
        2,
        1,
        Mask(causal=True, q_segments=PACKED, kv_segments=PACKED),
        {"soft_cap": 4.0},
    ),
    "a later rank's keys, and part of one's own": (
        128,
        128,
        1,
        1,
        Mask(causal=True, q_positions=places(0, 128), kv_positions=places(64, 192)),
        {"out": jnp.float32},
    ),
    "zigzag chunks, values of another size": (
        128,
        128,
        1,
        1,
        Mask(
            causal=True,
            window=(150, 0),
            q_positions=places(64, 384),
            kv_positions=places(0, 256),
        ),
        {"h": 192, "hv": 128},
    ),
    "bias for all rows": (130, 100, 2, 2, Mask(), {"b": 2, "bias": (1, 2), "soft_cap": 3.0}),
    "bias for all heads": (
        128,
        128,
        2,
        1,
        Mask(causal=True),
        {"b": 2, "bias": (2, 1), "bias_dtype": jnp.bfloat16, "h": 96, "scale": -0.1},
    ),
    "one stage of bias": (64, 192, 1, 1, Mask(), {"bias": (1, 1), "h": 256}),
}


CATCHES = {
    "head size 128, causal, grouped heads": pytest.mark.catches("kernel-scale-forward"),
    "causal, grouped heads": pytest.mark.catches("kernel-heads-of-a-group"),
    "a later rank's keys, and part of one's own": pytest.mark.catches("kernel-range-end"),
}


@everywhere
@pytest.mark.parametrize("name", quick_first(CASES, 1, CATCHES))
def test_it_is_attention(name, place):
    s, t, n, kv_heads, mask, other = CASES[name]
    b, h, dtype = other.get("b", 1), other.get("h", 64), other.get("dtype", jnp.bfloat16)
    rng = np.random.default_rng(0)
    shapes = (b, s, n, h), (b, t, kv_heads, h), (b, t, kv_heads, other.get("hv", h))
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    bias = None
    if "bias" in other:
        of_pairs = rng.normal(size=(*other["bias"], s, t))
        bias = jnp.asarray(of_pairs, other.get("bias_dtype", jnp.float32))
    options = {"scale": other.get("scale", h**-0.5), "soft_cap": other.get("soft_cap")}
    lo, hi = row_ranges(mask, s, t)
    run = functools.partial(forward, **options, dtype=other.get("out", dtype))
    run = functools.partial(run, interpret=place == "interpret")
    out, lse = jax.jit(run)(q, k, v, lo=lo, hi=hi, bias=bias)
    assert no_races(place)
    assert out.dtype == other.get("out", dtype)
    expected, expected_lse = exact(q, k, v, dense(mask, s, t), bias, **options)
    nothing = np.isneginf(expected_lse)
    assert nothing.any() == ("packed" in name or "part" in name)
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(
        np.where(nothing, 0, lse), np.where(nothing, 0, expected_lse), rtol=1e-5, atol=1e-5
    )
    found = np.asarray(out, np.float64)
    assert not found[np.swapaxes(nothing, 1, 2)].any()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 3e-3


def exact(q, k, v, seen, bias, *, scale, soft_cap):
    """Attention and its log-partition in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = np.einsum("bsnh,btnh->bnst", q, k) * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + np.asarray(bias, np.float64)
    weights = np.where(np.asarray(seen), np.exp(logits), 0)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    weights = weights / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bnst,btnh->bsnh", weights, v), lse


CAUSAL = Mask(causal=True)
# Positions of the queries, of two sets of keys, and how many rows see none of the first, none of
# the second, neither; then what else differs.
STEPS = {
    "causal, own keys and then those before": (
        places(64, 128),
        (places(64, 128), places(0)),
        CAUSAL,
        (0, 0, 0),
        {"n": 2, "h": 128},
    ),
    "zigzag: own keys, then a later rank's": (
        places(64, 384),
        (places(64, 384), places(128, 320)),
        CAUSAL,
        (0, 64, 0),
        {"b": 2},
    ),
    "rows that see nothing in either": (
        places(40, 200, length=50),
        (places(100, length=70), places(70, 210, length=40)),
        Mask(causal=True, window=(70, 0)),
        (60, 40, 30),
        {"h": 192, "hv": 128, "soft_cap": 3.0},
    ),
}


STEP_CATCHES = {
    "causal, own keys and then those before": pytest.mark.catches("kernel-carried-state"),
    "zigzag: own keys, then a later rank's": pytest.mark.catches("kernel-carried-base"),
}


@pytest.mark.sentinel("causal, own keys and then those before-interpret")
@everywhere
@pytest.mark.parametrize("name", quick_first(STEPS, 1, STEP_CATCHES))
def test_what_is_carried_is_merged(name, place):
    """A block after another is attention to the keys of both; empty rows in each."""
    rows, columns, mask, empty, other = STEPS[name]
    b, n, h, s = other.get("b", 1), other.get("n", 1), other.get("h", 64), rows.shape[1]
    cut = columns[0].shape[1]
    t = cut + columns[1].shape[1]
    rng = np.random.default_rng(2)
    shapes = (b, s, n, h), (b, t, 1, h), (b, t, 1, other.get("hv", h))
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    options = {"scale": h**-0.5, "soft_cap": other.get("soft_cap")}
    parts = [dataclasses.replace(mask, q_positions=rows, kv_positions=x) for x in columns]
    seen = [dense(part, s, x.shape[1]) for part, x in zip(parts, columns, strict=True)]
    first = exact(q, k[:, :cut], v[:, :cut], seen[0], None, **options)
    expected, expected_lse = exact(q, k, v, jnp.concatenate(seen, axis=-1), None, **options)
    nothing = np.isneginf(expected_lse)
    per_row = b * n
    hidden = [per_row * int((~x.any(-1)).sum()) for x in seen]
    assert (*hidden, nothing.sum()) == tuple(per_row * x for x in empty)

    @jax.jit
    def step(q, k, v, out, lse):
        return attend_block(
            q,
            k,
            v,
            mask=dataclasses.replace(parts[1], ascending=True),
            carried=(out, lse),
            implementation=place,
            **options,
        )

    carried = (jnp.asarray(x, jnp.float32) for x in first)
    out, lse = step(q, k[:, cut:], v[:, cut:], *carried)
    assert no_races(place)
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(
        np.where(nothing, 0, lse), np.where(nothing, 0, expected_lse), rtol=1e-5, atol=1e-5
    )
    found = np.asarray(out, np.float64)
    assert not found[np.swapaxes(nothing, 1, 2)].any()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 3e-3


@everywhere
def test_under_vmap_what_is_carried_is_kept_apart(place):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 128, 1, 64)), jnp.bfloat16) for _ in range(3))
    out = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    lse = jnp.asarray(rng.normal(size=(2, 1, 1, 128)), jnp.float32)

    def step(q, k, v, out, lse, implementation):
        options = {"scale": 0.1, "implementation": implementation}
        return attend_block(q, k, v, mask=Mask(), carried=(out, lse), **options)

    run = jax.jit(jax.vmap(step, (0, None, 0, 0, 0, None)), static_argnums=5)
    found, expected = (run(q, k[0], v, out, lse, name) for name in (place, "xla"))
    assert no_races(place)
    for one, other in zip(found, expected, strict=True):
        assert jnp.linalg.norm(one - other) < 3e-3 * jnp.linalg.norm(other)


# ---- choice --------------------------------------------------------------------------------------


def spec(**changes):
    fields = {
        "batch": 2,
        "q_length": 1024,
        "kv_length": 1024,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "v_head_dim": 128,
        "dtype": jnp.dtype("bfloat16"),
        "mask": Mask(causal=True),
    }
    return AttentionSpec(**{**fields, **changes})


def bias(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


TARGETS = {
    "sm_70": ("gpu", (7, 0), "capability 9.0, found 7.0"),
    "sm_80": ("gpu", (8, 0), "capability 9.0, found 8.0"),
    "sm_86": ("gpu", (8, 6), "capability 9.0, found 8.6"),
    "sm_89": ("gpu", (8, 9), "capability 9.0, found 8.9"),
    "sm_90": ("gpu", (9, 0), None),
    "sm_100": ("gpu", (10, 0), "capability 9.0, found 10.0"),
    "sm_103": ("gpu", (10, 3), "capability 9.0, found 10.3"),
    "sm_120": ("gpu", (12, 0), "capability 9.0, found 12.0"),
    "unknown GPU": ("gpu", None, "the target's is not known"),
    "cpu": ("cpu", None, "need an NVIDIA GPU, the target is 'cpu'"),
    "tpu": ("tpu", None, "need an NVIDIA GPU, the target is 'tpu'"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_only_hopper_ever_sees_a_kernel(name):
    platform, capability, reason = TARGETS[name]
    there = Target(platform=platform, compute_capability=capability)
    if reason is None:
        assert choose(spec(), there) == choose(spec(), there, "mosaic") == "mosaic"
    else:
        assert choose(spec(), there) != "mosaic"
        with pytest.raises(NotImplementedError, match=reason):
            choose(spec(), there, "mosaic")
    if platform != "cpu":
        with pytest.raises(NotImplementedError, match="interpreted on a CPU"):
            choose(spec(), there, "interpret")


HOPPER = Target(platform="gpu", compute_capability=(9, 0))
IDS = jnp.zeros((1, 1024), jnp.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 192},
        {"mask": Mask(window=(5, 3)), "dtype": jnp.dtype("float16")},
        {"mask": Mask(causal=True, prefix=jnp.asarray([4]))},
        {"mask": Mask(q_positions=IDS, kv_positions=IDS)},  # without order they mean nothing
        {"mask": Mask(causal=True, q_segments=IDS, kv_segments=IDS, ascending=True)},
        {"mask": Mask(causal=True, q_positions=IDS, kv_positions=IDS, ascending=True)},
        {"biases": (bias(1, 8, 1024, 1024),), "soft_cap": True, "sinks": True},
        {"return_lse": True},
    ],
)
def test_on_hopper_auto_takes_the_kernel(changes):
    assert choose(spec(**changes), HOPPER) == "mosaic"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": jnp.dtype("float32")}, "take bfloat16 and float16, found float32"),
        ({"head_dim": 80, "v_head_dim": 80}, "head sizes 80 of keys and 80 of values; there are"),
        ({"v_head_dim": 64}, "there are 64, 96, 128, 192/128, 192, 256"),
        ({"kv_length": 0}, "there are no tokens"),
        ({"alibi": True}, "alibi_slopes are not available"),
        ({"checked": True}, "give check_vma=False"),
        ({"biases": (bias(1, 1, 1024, 1024),) * 2}, "2 biases; the kernels take one"),
        ({"biases": (bias(1, 8, 1, 1024),)}, "not an array over all queries and keys"),
        ({"biases": (bias(1, 8, 1024, 1),)}, "not an array over all queries and keys"),
        ({"biases": (bias(1, 8, 1024, 1024, dtype=jnp.int32),)}, "a bias of int32"),
        ({"mask": Mask(kv_valid=IDS == 0)}, "kv_valid may have holes"),
        ({"mask": Mask(window=(3, 0), prefix=jnp.asarray([4]))}, "a prefix and a window"),
        ({"mask": Mask(q_segments=IDS, kv_segments=IDS)}, "must ascend along a row"),
        ({"mask": Mask(causal=True, q_positions=IDS)}, "must ascend along a row"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        choose(spec(**changes), HOPPER, "mosaic")
    assert choose(spec(**changes), HOPPER) != "mosaic"


@pytest.mark.parametrize("checked", [False, True])
def test_a_checked_shard_map_is_left_to_others(devices, checked):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        lambda q, k, v: attention(q, k, v, mask=Mask(causal=True)),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec("data"),
        check_vma=checked,
    )
    arrays = (jnp.zeros((2, 128, 1, 64), jnp.bfloat16),) * 3
    with target("gpu", compute_capability=(9, 0)):
        traced = str(jax.make_jaxpr(split)(*arrays))
    assert ("wgmma" in traced) is not checked


def test_auto_never_interprets():
    cpu = Target(platform="cpu")
    assert choose(spec(), cpu) == "xla"
    assert choose(spec(), cpu, "interpret") == "interpret"


@everywhere
@pytest.mark.catches("gradient-of-log-partition")
def test_the_call_differentiates(place):
    """Output, lse, sinks and gradients through the public call, leading dims and all."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 1, 100, n, 64)), jnp.bfloat16) for n in (2, 1, 1))
    of_pairs = jnp.asarray(rng.normal(size=(1, 1, 1, 100, 100)), jnp.float32)
    sinks = jnp.asarray([0.5, -1.0])
    segments = ids((0, 40), (-1, 10), (1, 50))[None]
    mask = Mask(causal=True, q_segments=segments, kv_segments=segments, ascending=True)

    def loss(q, k, v, of_pairs, sinks, implementation):
        out, lse = attention(
            q,
            k,
            v,
            mask=mask,
            biases=(of_pairs,),
            sinks=sinks,
            soft_cap=5.0,
            return_lse=True,
            implementation=implementation,
        )
        seen = segments[:, :, None] >= 0
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.where(seen, jnp.cos(lse), 0))

    given = (q, k, v, of_pairs, sinks)
    gradient = jax.jit(jax.value_and_grad(loss, range(5)), static_argnums=5)
    found = gradient(*given, place)
    assert no_races(place)
    wide = [x.astype(jnp.float32) for x in given]
    expected = gradient(*wide, "reference")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(one, np.float32) - other) < 5e-3 * np.linalg.norm(other)
