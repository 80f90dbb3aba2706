"""What the names of dims decide, as a table, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.optim import adamw, decay_mask, decays
from colossax.optim.dims import map_with_dims, unit_norms


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((), False),
        (("embed",), False),
        (("layers", "embed"), False),
        (("layers", "experts", "expert_mlp"), False),
        (("stages", "layers", "embed"), False),
        (("layers", "head_dim"), False),
        (("heads", "head_dim"), False),
        (("layers", "kv_heads", "head_dim"), False),
        (("layers:time", "embed"), False),
        (("embed", "mlp"), True),
        (("vocab", "embed"), True),
        ((None, "embed"), True),
        (("layers", "embed", "mlp"), True),
        (("embed", "heads", "head_dim"), True),
        (("layers", "heads", "head_dim", "embed"), True),
        (("layers", "experts", "expert_embed", "expert_mlp"), True),
    ],
)
def test_only_matrices_and_tables_decay(dims, expected):
    assert decays(dims) is expected


def test_decay_mask_keeps_the_tree():
    dims = {"a": {"w": ("embed", "mlp"), "b": ("mlp",)}, "scale": ()}
    assert decay_mask(dims) == {"a": {"w": True, "b": False}, "scale": False}


def test_unit_norms_are_numpy_norms_of_each_layer_and_expert():
    x = np.random.default_rng(0).normal(size=(3, 4, 2, 5)).astype(np.float32)
    found = unit_norms(jnp.asarray(x), ("layers", "embed", "experts", "mlp"))
    assert found.shape == (3, 1, 2, 1)
    for layer in range(3):
        for expert in range(2):
            want = np.linalg.norm(x[layer, :, expert])
            np.testing.assert_allclose(found[layer, 0, expert, 0], want, rtol=1e-6)


def test_unit_norms_of_bfloat16_are_summed_in_float32():
    x = jnp.full((4096,), 1.0, jnp.bfloat16)
    assert unit_norms(x, ("embed",)).dtype == jnp.float32
    assert float(unit_norms(x, ("embed",))[0]) == 64.0


def test_map_with_dims_skips_what_is_frozen():
    tree = {"a": jnp.ones(3), "frozen": None}
    out = map_with_dims(lambda d, x: d, {"a": ("embed",), "frozen": None}, tree)
    assert out == {"a": ("embed",), "frozen": None}


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"a": {}}, "'a/w' is among the parameters but not among the dims; make"),
        ({"a": {"w": ("embed", "mlp")}, "b": ()}, "'b' is among the dims but not among the param"),
        ({"a": {"w": ("embed",)}}, r"'a/w' has 2 dims but 1 names \('embed',\); give one name"),
    ],
)
def test_dims_that_do_not_fit_are_refused(dims, message):
    params = {"a": {"w": jnp.ones((2, 3))}}
    optimizer = adamw(0.1)(dims)
    with pytest.raises(InputError, match=message):
        optimizer.update(params, optimizer.init(params), params)
