"""The optimizer a configuration asks for: its state in bytes, and what is refused."""

import re

import jax
import jax.numpy as jnp
import pytest

from colossax.errors import InputError
from colossax.optim import is_layerwise
from colossax.tasks.config import OPTIMIZER_STATES, OptimizerConfig
from colossax.tasks.optimizer import OPTIMIZERS, make_optimizer

PARAMS = {"w": jnp.ones((16, 64)), "b": jnp.ones(64)}
DIMS = {"w": ("embed", "mlp"), "b": ("mlp",)}

BYTES = {
    ("adamw", "float32"): 12,
    ("adamw", "mixed"): 10,
    ("adamw", "bfloat16"): 8,
    ("lamb", "float32"): 12,
    ("lamb", "mixed"): 10,
    ("lamb", "bfloat16"): 8,
    ("lars", "float32"): 8,
    ("lars", "bfloat16"): 6,
    ("sgd", "float32"): 8,
    ("sgd", "bfloat16"): 6,
}
ONE_MOMENT = {(name, "mixed") for name in ("lars", "sgd")}


def test_every_optimizer_and_state_is_in_the_table():
    known = {(name, state) for name in OPTIMIZERS for state in OPTIMIZER_STATES}
    assert known == set(BYTES) | ONE_MOMENT


@pytest.mark.catches("second-moment-wide")
@pytest.mark.parametrize(("name", "state"), BYTES)
def test_bytes_per_parameter_with_the_parameter(name, state):
    make = make_optimizer(OptimizerConfig(name=name, state=state), 10)
    assert is_layerwise(make)
    kept = [PARAMS, make(DIMS).init(PARAMS)]
    arrays = [x for x in jax.tree.leaves(kept) if x.ndim]
    count = sum(x.size for x in PARAMS.values())
    assert sum(x.nbytes for x in arrays) == BYTES[name, state] * count


def test_mixed_keeps_the_second_moment_wide():
    state = make_optimizer(OptimizerConfig(state="mixed"), 10)(DIMS).init(PARAMS)
    assert state[0].mu["w"].dtype == jnp.bfloat16
    assert state[0].nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(("name", "state"), sorted(ONE_MOMENT))
def test_one_moment_cannot_be_mixed(name, state):
    message = (
        f"optimizer.state: 'mixed' tells two moments apart, {name} has only one; choose float32"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        make_optimizer(OptimizerConfig(name=name, state=state), 10)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("bfloat61", "optimizer.state: unknown 'bfloat61'; did you mean 'bfloat16'?"),
        ("8", "optimizer.state: unknown '8'; known: bfloat16, float32, mixed"),
    ],
)
def test_unknown_states_are_refused(state, message):
    with pytest.raises(InputError, match=re.escape(message)):
        OptimizerConfig(state=state)
