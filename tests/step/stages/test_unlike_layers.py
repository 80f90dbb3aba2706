"""Layers that stages cannot run alike in one program are refused, not run as if they were."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import Plan
from colossax.errors import PlanError
from colossax.nn import LayerStack, param
from colossax.planner import build_step
from tests.step.stages.test_stages import devices_of, piped

WIDTH = 4


class Bent(nnx.Module):
    """A map and a function of one number."""

    def __init__(self, bend, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)), ("embed", "mlp"))
        self.bend = bend

    def __call__(self, x, side, state):
        return self.bend(x @ self.w[...]), state, {}


class Numbered(nnx.Module):
    """Hands on rows with a whole number for each."""

    def __init__(self, *, rngs):
        self.w = param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)), ("embed", "mlp"))

    def __call__(self, carry, side, state):
        x, numbers = carry
        return (jnp.tanh(x @ self.w[...]) + numbers[:, None], numbers), state, {}


def model(kinds, order=None):
    class Model(nnx.Module):
        def __init__(self, rngs):
            stack = (kinds, order) if order else (kinds, 4)
            self.layers = LayerStack(*stack, rngs=rngs)

    return Model


KINDS = {
    "a": lambda rngs: Bent(jnp.tanh, rngs=rngs),
    "b": lambda rngs: Bent(jnp.sin, rngs=rngs),
}
X = np.ones((8, WIDTH), np.float32)
NUMBERS = np.arange(8, dtype=np.int32)


def square(model, batch):
    given = (batch["x"], batch["numbers"]) if "numbers" in batch else batch["x"]
    carry = model.layers(given).carry
    last = carry[0] if isinstance(carry, tuple) else carry
    return {"square": (jnp.sum(jnp.square(last)), jnp.float32(len(batch["x"])), 1.0)}, {}


CASES = {
    "of one form": (model(KINDS, ["a", "a", "b", "b"]), {}, 2, "its runs of layers differ"),
    "by turns": (model(KINDS, ["a", "b"] * 2), {}, 1, "layers of stack 'layers' are of kinds that"),
    "whole numbers": (
        model(lambda rngs: Numbered(rngs=rngs)),
        {"numbers": NUMBERS},
        1,
        "hand on int32\\[4\\], and stages send gradients of all that is handed on; give it as side",
    ),
}


@pytest.mark.catches("stage-kinds-of-one-form")
@pytest.mark.parametrize(("made", "more", "chunks", "message"), CASES.values(), ids=CASES)
def test_they_are_refused(made, more, chunks, message):
    plan = Plan(mesh={"stage": 2}, **piped(2, chunks=chunks))
    dims = {"x": ("batch", "embed"), "numbers": ("batch",)}
    with pytest.raises(PlanError, match=message):
        step = build_step(
            made, optax.sgd(1.0), square, plan, devices=devices_of(plan), batch_dims=dims
        )
        jax.eval_shape(step.gradients, step.abstract, {"x": X, **more})
