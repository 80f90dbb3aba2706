"""One table of masks, heads and features; every implementation against one slow truth."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.test_util import check_grads

from colossax.pallas import current_target, target
from colossax.pallas.attention import Mask, attention, dense, xla

B, S, HEAD = 2, 40, 8


def segments(rng):
    rows = np.sort(rng.integers(0, 3, (B, S)), axis=1)
    rows[:, -5:] = -1
    rows[1, :3] = -1
    return jnp.asarray(rows, jnp.int32)


def restarting(ids):
    """Positions that begin at 0 in every run of equal segments."""
    ids = np.asarray(ids)
    found = np.zeros_like(ids)
    for row in range(B):
        for i in range(1, S):
            found[row, i] = found[row, i - 1] + 1 if ids[row, i] == ids[row, i - 1] else 0
    return jnp.asarray(found)


def make_masks():
    rng = np.random.default_rng(0)
    ids = segments(rng)
    both = {"q_segments": ids, "kv_segments": ids}
    where = {"q_positions": restarting(ids), "kv_positions": restarting(ids)}
    order = jnp.asarray(rng.permutation(S)[None], jnp.int32)
    return {
        "all": Mask(),
        "causal": Mask(causal=True),
        "window": Mask(causal=True, window=(5, 0)),
        "two_sided": Mask(window=(4, 3)),
        "prefix_window": Mask(causal=True, window=(3, 0), prefix=jnp.asarray([7, 2])),
        "packed": Mask(causal=True, window=(6, 0), **both, **where),
        "bidirectional_packed": Mask(**both),
        "shuffled": Mask(causal=True, q_positions=order, kv_positions=order),
        "nothing_before": Mask(
            causal=True,
            q_positions=jnp.arange(S, dtype=jnp.int32)[None],
            kv_positions=11 + jnp.arange(S, dtype=jnp.int32)[None],
        ),
        "holes": Mask(causal=True, kv_valid=jnp.asarray(rng.random((B, S)) < 0.6)),
    }


MASKS = make_masks()
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
FEATURES = {
    "plain": {},
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "everything": {
        "soft_cap": 2.0,
        "alibi_slopes": True,
        "sinks": True,
        "v_head": 12,
        "scale": 0.4,
    },
}


attend = jax.jit(attention, static_argnames=("return_lse", "implementation"))


def operands(heads=(4, 2), *, s=S, t=S, v_head=HEAD, dtype=jnp.float32, seed=0):
    n, k = heads
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, s, n, HEAD), (B, t, k, HEAD), (B, t, k, v_head)
    return tuple(jax.random.normal(r, x, dtype) for r, x in zip(keys, shapes, strict=True))


def prepare(heads, feature):
    options = dict(FEATURES[feature])
    arrays = operands(HEADS[heads], v_head=options.pop("v_head", HEAD))
    learned = {}
    for i, name in enumerate(("alibi_slopes", "sinks")):
        if options.pop(name, False):
            learned[name] = 0.3 * jax.random.normal(jax.random.key(7 + i), (HEADS[heads][0],))
    return arrays, learned, options


def run(implementation, arrays, learned, options, mask):
    """Output, lse and the gradients of a loss that uses both."""
    return runner(implementation, tuple(options.items()))(arrays, learned, mask)


@functools.cache
def runner(implementation, options):
    """One jitted function for all masks of equal structure."""

    @jax.jit
    def everything(arrays, learned, mask):
        def both(arrays, learned):
            return attention(
                *arrays,
                mask=mask,
                return_lse=True,
                implementation=implementation,
                **learned,
                **dict(options),
            )

        (out, lse), pull = jax.vjp(both, arrays, learned)
        rng = np.random.default_rng(3)
        dout = jnp.asarray(rng.normal(size=out.shape), out.dtype)
        dlse = jnp.asarray(rng.normal(size=lse.shape), lse.dtype)
        return out, lse, pull((dout, dlse))

    return everything


@functools.cache
def truth(mask, heads, feature):
    return run("reference", *prepare(heads, feature), MASKS[mask])


def close(found, expected, tolerance=1e-5):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isneginf(f), np.isneginf(e))
        f, e = (np.where(np.isneginf(x), 0, np.asarray(x, np.float64)) for x in (f, e))
        assert np.isfinite(f).all()
        scale = max(1.0, np.abs(e).max())
        assert np.abs(f - e).max() <= tolerance * scale


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, the last one not full, in short sequences."""
    monkeypatch.setattr(xla, "TILE", {"cpu": 16})


def in_float64(arrays, learned, options, mask):
    """The formula row by row, in NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    learned = {name: np.asarray(x) for name, x in learned.items()}
    seen = np.broadcast_to(dense(mask, S, S), (B, 1, S, S))
    group = q.shape[2] // k.shape[2]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((B, q.shape[2], S), -np.inf)
    q_at = np.arange(S)[None] if mask.q_positions is None else np.asarray(mask.q_positions)
    kv_at = np.arange(S)[None] if mask.kv_positions is None else np.asarray(mask.kv_positions)
    for b, i, n in np.ndindex(B, S, q.shape[2]):
        where = np.nonzero(seen[b, 0, i])[0]
        x = k[b, where, n // group] @ q[b, i, n] * options.get("scale", 1 / math.sqrt(HEAD))
        if "soft_cap" in options:
            x = options["soft_cap"] * np.tanh(x / options["soft_cap"])
        if "alibi_slopes" in learned:
            slope = float(learned["alibi_slopes"][n])
            x = x - slope * (q_at[b % len(q_at), i] - kv_at[b % len(kv_at), where])
        extra = [float(learned["sinks"][n])] if "sinks" in learned else []
        logits = np.concatenate([x, extra])
        if len(logits) == 0:
            continue
        lse[b, n, i] = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        out[b, i, n] = np.exp(x - lse[b, n, i]) @ v[b, where, n // group]
    return out, lse


@pytest.mark.catches("grouped-queries-share")
@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_formula(mask):
    out, lse, _ = truth(mask, "gqa", "everything")
    close((out, lse), in_float64(*prepare("gqa", "everything"), MASKS[mask]))


def test_the_references_gradient_is_the_formulas():
    """By central differences in a random direction."""
    arrays, learned, options = prepare("gqa", "everything")
    mask = MASKS["packed"]

    @jax.jit
    def loss(arrays, learned):
        arrays, learned = jax.tree.map(jnp.asarray, (arrays, learned))
        out, lse = attention(
            *arrays, mask=mask, return_lse=True, implementation="reference", **learned, **options
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(jnp.isneginf(lse), 0, lse)))

    check_grads(loss, (arrays, learned), order=1, modes=("rev",), atol=1e-2, rtol=1e-2, eps=1e-2)


@pytest.mark.parametrize("mask", MASKS)
def test_blockwise_with_every_mask(mask):
    close(run("xla", *prepare("gqa", "everything"), MASKS[mask]), truth(mask, "gqa", "everything"))


@pytest.mark.parametrize("heads", ["mha", "mqa"])
def test_blockwise_with_every_grouping(heads):
    close(run("xla", *prepare(heads, "plain"), MASKS["packed"]), truth("packed", heads, "plain"))


@pytest.mark.parametrize("feature", list(FEATURES)[:-1])
def test_blockwise_with_every_feature(feature):
    close(run("xla", *prepare("gqa", feature), MASKS["packed"]), truth("packed", "gqa", feature))


@pytest.mark.parametrize("s, t, window", [(41, 24, (3, 0)), (24, 41, None), (1, 40, None)])
def test_lengths_of_queries_and_keys_differ_freely(s, t, window):
    mask = Mask(causal=True, window=window)
    found, expected = (run(i, operands(s=s, t=t), {}, {}, mask) for i in ("xla", "reference"))
    close(found, expected)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_row_that_sees_nothing_gives_nothing(implementation):
    mask = MASKS["packed"]
    out, lse, ((dq, dk, dv), _) = run(implementation, *prepare("gqa", "plain"), mask)
    hidden = np.asarray(mask.q_segments) < 0
    assert hidden.any()
    assert not np.asarray(out)[hidden].any() and not np.asarray(dq)[hidden].any()
    assert not np.asarray(dk)[hidden].any() and not np.asarray(dv)[hidden].any()
    assert np.isneginf(np.swapaxes(lse, 1, 2)[hidden]).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_sixteen_bits_in_and_out(implementation):
    wide = prepare("gqa", "plain")[0]
    narrow = tuple(x.astype(jnp.bfloat16) for x in wide)
    found = run(implementation, narrow, {}, {}, MASKS["packed"])
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(found[2]))
    close(found, truth("packed", "gqa", "plain"), tolerance=2e-2)


def test_biases_add_and_are_differentiated():
    q, k, v = operands()
    biases = [
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(B, 1, 1, S), (1, 4, S, S)])
    ]

    def loss(biases):
        return jnp.sum(jnp.sin(attend(q, k, v, mask=Mask(), biases=biases)))

    assert loss(biases) == pytest.approx(float(loss([biases[0] + biases[1]])), rel=1e-5)
    assert abs(float(loss(biases)) - float(loss(biases[:1]))) > 1e-2
    gradient = jax.grad(loss)(biases)
    assert [g.shape for g in gradient] == [b.shape for b in biases]
    assert all(jnp.abs(g).max() > 1e-3 for g in gradient)


def test_alibi_by_distance_is_alibi_by_key_index():
    """BLOOM adds slope * key index; a constant per row does not change the softmax."""
    q, k, v = operands()
    slopes = jnp.asarray([0.5, 0.25, 0.1, 0.05])
    ours = attend(q, k, v, mask=Mask(causal=True), alibi_slopes=slopes)
    bias = (slopes[:, None] * jnp.arange(S))[None, :, None, :]
    close(ours, attend(q, k, v, mask=Mask(causal=True), biases=(bias,)))


def test_there_may_be_any_number_of_batch_dims():
    q, k, v = operands()
    mask = MASKS["packed"]
    flat = attend(q, k, v, mask=mask, return_lse=True)

    def more(x):
        return jnp.broadcast_to(x[:, None], (B, 3, *x.shape[1:]))

    deep = jax.tree.map(lambda x: x[:, None], mask)
    out, lse = attend(more(q), more(k), more(v), mask=deep, return_lse=True)
    close((out, lse), jax.tree.map(more, flat))
    single = jax.tree.map(lambda x: x[0], mask)
    out, lse = attend(q[0], k[0], v[0], mask=single, return_lse=True)
    close((out, lse), jax.tree.map(lambda x: x[0], flat))


def test_parts_merge_by_lse():
    """Attention over two halves of the keys, put together by their log-partitions."""
    q, k, v = operands()
    whole = attend(q, k, v, mask=Mask(causal=True))
    half = S // 2
    parts = [
        attend(
            q,
            k[:, i : i + half],
            v[:, i : i + half],
            mask=Mask(causal=True, kv_positions=i + jnp.arange(half)[None]),
            return_lse=True,
        )
        for i in (0, half)
    ]
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * jnp.swapaxes(jnp.exp(p - lse), 1, 2)[..., None] for o, p in parts)
    close(merged, whole)


def test_wrong_shapes_are_named(monkeypatch):
    # Users run without the annotations' own checks.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, k, v = operands()
    wrong = jnp.zeros((1, S + 1), int)
    refused = [
        ({"mask": Mask(), "k": k[:, :, :, :4]}, r"k \(2, 40, 2, 4\).*do not fit"),
        ({"mask": Mask(), "q": q[:, :, :3]}, "3 query heads are no multiple of 2"),
        ({"mask": Mask(q_positions=wrong)}, r"mask q_positions \(1, 41\) does not fit"),
        ({"mask": Mask(prefix=jnp.ones(3, int))}, r"mask prefix \(3,\) does not fit"),
        (
            {"mask": Mask(), "biases": (jnp.zeros((S, S)),)},
            r"bias \(40, 40\) is not \(2, 4, 40, 40\)",
        ),
        ({"mask": Mask(), "sinks": jnp.zeros(3)}, r"sinks \(3,\) is not \(4,\)"),
        ({"mask": Mask(), "k": k.astype(jnp.bfloat16)}, "dtypes float32, bfloat16, float32 differ"),
        ({"mask": Mask(), "implementation": "flash"}, "no implementation 'flash'; use one of"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            attention(**{"q": q, "k": k, "v": v, **arguments})


def test_an_implementation_named_declines_with_its_reason():
    q, k, v = operands()
    with pytest.raises(NotImplementedError, match="'cudnn': cuDNN needs an NVIDIA GPU"):
        attention(q, k, v, mask=Mask(), implementation="cudnn")


def test_all_reasons_are_told_when_none_is_left(monkeypatch):
    from colossax.pallas.attention import api

    for module in api.IMPLEMENTATIONS.values():
        monkeypatch.setattr(module, "why_not", lambda spec, target: "it is Sunday")
    with pytest.raises(ExceptionGroup) as found:
        attention(*operands(), mask=Mask())
    assert [str(e) for e in found.value.exceptions] == [
        f"attention '{name}': it is Sunday" for name in ("mosaic", "cudnn", "xla", "reference")
    ]


def test_the_target_is_part_of_the_trace():
    """A function jitted for one target is traced again for another."""
    seen = []

    @jax.jit
    def f(x):
        seen.append(current_target())
        return x + 1

    f(1)
    with target("gpu", compute_capability=(9, 0)):
        f(1)
    f(1)
    assert [t.platform for t in seen] == ["cpu", "gpu"]
    assert seen[1].compute_capability == (9, 0)
