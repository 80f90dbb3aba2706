"""cuDNN's form without a GPU: what it declines, and what it would hand over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas import target
from colossax.pallas.attention import Mask, attention
from colossax.pallas.attention.api import choose
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.target import Target

# Where there is no kernel of ours.
BLACKWELL = Target(platform="gpu", compute_capability=(10, 0))
IDS = jnp.asarray(np.repeat([[0, 1, 2, -1], [0, 0, 1, 1]], 4, axis=1), jnp.int32)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr("colossax.pallas.attention.cudnn.cudnn_installed", lambda: True)


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


@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(causal=True),
        Mask(causal=True, window=(4, 0)),
        Mask(causal=True, q_segments=IDS, kv_segments=IDS),
        Mask(kv_valid=jnp.ones((2, 16), bool)),
    ],
)
def test_auto_takes_it_on_a_gpu(mask):
    assert choose(spec(mask=mask), BLACKWELL) == "cudnn"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": jnp.dtype("float32")}, "takes bfloat16 and float16, found float32"),
        ({"head_dim": 100, "v_head_dim": 100}, "head size 100 is not a multiple of 8 up to 256"),
        ({"head_dim": 264, "v_head_dim": 264}, "head size 264"),
        ({"v_head_dim": 64}, "head sizes 128 and 64"),
        ({"return_lse": True, "sinks": True}, "sinks, return_lse not available"),
        ({"alibi": True}, "alibi_slopes not available"),
        ({"soft_cap": True}, "soft_cap not available"),
        ({"kv_length": 512}, "causal with 1024 queries and 512 keys"),
        (
            {"q_length": 33, "kv_length": 33, "mask": Mask(q_segments=IDS, kv_segments=IDS)},
            "odd lengths 33, 33",
        ),
        (
            {"q_length": 2**15, "kv_length": 2**15, "mask": Mask(q_segments=IDS, kv_segments=IDS)},
            "the mask as an array takes 4294967296 bytes",
        ),
    ],
)
def test_what_it_declines_goes_to_the_blockwise_form(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        choose(spec(**changes), BLACKWELL, "cudnn")
    assert choose(spec(**changes), BLACKWELL) == "xla"


def test_where_cudnn_is_not_installed_the_blockwise_form_serves(monkeypatch):
    monkeypatch.setattr("colossax.pallas.attention.cudnn.cudnn_installed", lambda: False)
    assert choose(spec(), BLACKWELL) == "xla"
    with pytest.raises(NotImplementedError, match="is not installed: pip install"):
        choose(spec(), BLACKWELL, "cudnn")


def test_hardware_too_old_is_declined():
    for platform, capability in (("gpu", (7, 5)), ("cpu", None)):
        with pytest.raises(NotImplementedError, match="cuDNN"):
            choose(spec(), Target(platform=platform, compute_capability=capability), "cudnn")
    older = Target(platform="gpu", compute_capability=(8, 0))
    with pytest.raises(NotImplementedError, match="up to 128"):
        choose(spec(head_dim=256, v_head_dim=256), older, "cudnn")


MASKS = {
    "all": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(3, 0)),
    "two_sided": Mask(window=(2, 3)),
    "packed": Mask(causal=True, window=(3, 0), q_segments=IDS, kv_segments=IDS),
    "positions": Mask(
        causal=True, q_positions=jnp.arange(16)[None] + 2, kv_positions=jnp.arange(16)[None]
    ),
    "holes": Mask(kv_valid=jnp.arange(16)[None] % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_arguments_mean_the_mask(name, monkeypatch):
    """JAX's plain form, given the very arguments meant for cuDNN, agrees with our reference."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(r, (2, 16, n, 16), jnp.bfloat16)
        for r, n in zip(keys, (4, 2, 2), strict=True)
    )
    plain, native = jax.nn.dot_product_attention, []

    def stand_in(*arrays, implementation, **options):
        assert implementation == "cudnn"
        native.append((options["is_causal"], options["local_window_size"], options["mask"] is None))
        return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)

    def total(q, k, v, implementation):
        out = attention(q, k, v, mask=MASKS[name], implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    gradient = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True), static_argnums=3)
    with target("gpu", compute_capability=(9, 0)):
        found = gradient(q, k, v, "cudnn")
    expected = gradient(q, k, v, "reference")
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(f.astype(jnp.float32), e.astype(jnp.float32), atol=5e-2)
    expected_native = {
        "all": (False, None, True),
        "causal": (True, None, True),
        "window": (True, (3, 0), True),
        "packed": (True, (3, 0), False),
    }
    assert native[0] == expected_native.get(name, (False, None, False))
