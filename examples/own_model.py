"""A model and a loss of your own, under a Plan: your modules, our step, or your own `jax.jit`.

Usage: python examples/own_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import colossax
from colossax.nn import param


class Block(nnx.Module):
    """Name the dims; the plan decides where they live."""

    def __init__(self, embed: int, mlp: int, *, rngs: nnx.Rngs):
        normal = nnx.initializers.lecun_normal()
        self.up = param(normal(rngs.params(), (embed, mlp)), ("embed", "mlp"))
        self.down = param(normal(rngs.params(), (mlp, embed)), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(colossax.linear(x, self.up[...], ("embed", "mlp")))
        h = colossax.constrain(h, "batch", "mlp")
        return x + colossax.linear(h, self.down[...], ("mlp", "embed"))


def make_model(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(*(Block(32, 128, rngs=rngs) for _ in range(2)))


def loss(model: nnx.Module, batch: dict):
    """A total and its weight, never a mean: the step divides, over all devices and microbatches."""
    error = jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=-1) * batch["weight"]
    return {"squared_error": (jnp.sum(error), jnp.sum(batch["weight"]), 1.0)}, {}


def main(steps: int = 100) -> list[float]:
    plan = colossax.Plan(mesh={"fsdp": -1, "tensor": 2 if jax.device_count() % 2 == 0 else 1})
    state, step = colossax.boost(make_model, optax.adam(3e-3), loss, plan)

    random, losses = np.random.default_rng(0), []
    for _ in range(steps):
        x = random.normal(size=(64, 32)).astype(np.float32)
        batch = {"x": x, "y": np.roll(x, 1, axis=-1), "weight": np.ones(64, np.float32)}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))

    with colossax.use(plan):  # the same modules and layouts inside a jit of your own
        predict = jax.jit(lambda params, x: step.spec.merge(params)(x))
        error = jnp.mean(jnp.abs(predict(state["params"], x) - np.roll(x, 1, axis=-1)))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, mean error {float(error):.3f}")
    return losses


if __name__ == "__main__":
    main()
