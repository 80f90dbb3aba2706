"""What an update holds besides what it updates: nothing, so that it need not go in tiles."""

import jax
import jax.numpy as jnp
import optax

from colossax.optim import adamw

GIB = 2**30


def update_memory(optimizer, give_away):
    """Of an update of 2 GiB of float32 parameters, compiled and not run."""
    shapes = {"experts": jax.ShapeDtypeStruct((64, 2048, 4096), jnp.float32)}
    made = optimizer({"experts": ("experts", "expert_embed", "expert_mlp")})
    state = jax.eval_shape(made.init, shapes)

    def update(params, grads, state):
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(update, donate_argnums=(0, 2) if give_away else ())
    return jitted.lower(shapes, shapes, state).compile().memory_analysis()


def test_an_update_of_all_experts_at_once_needs_no_memory():
    memory = update_memory(adamw(3e-4), give_away=True)
    assert memory.temp_size_in_bytes < 2**20
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < 2 * GIB + 2**20
    kept = update_memory(adamw(3e-4), give_away=False)
    assert kept.output_size_in_bytes - kept.alias_size_in_bytes > 5.9 * GIB
