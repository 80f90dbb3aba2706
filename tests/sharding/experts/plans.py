"""Plans of experts on eight devices, and what experts do written down without any."""

import dataclasses

import jax
import jax.numpy as jnp

from colossax.config import ExpertsConfig, Plan, preset

B, S, D, F, E, K = 8, 16, 8, 16, 8, 2
DIMS = {
    "up": ("experts", "expert_embed", "expert_mlp"),
    "gate": ("experts", "expert_embed", "expert_mlp"),
    "down": ("experts", "expert_mlp", "expert_embed"),
}


def plan(mesh, dispatch="auto", group=None, *, name=None, **more):
    experts = ExpertsConfig(dispatch=dispatch, group=group, **more)
    if name is not None:
        return preset(name, mesh=mesh, experts=experts)
    return Plan(mesh=mesh, experts=experts)


SPLIT = "zero3+megatron_sp"
"""The residual stream's sequence is split over `tensor`, so that experts get tokens in parts."""

MESHES = {
    "expert8": {"expert": 8},
    "expert4-tensor2": {"expert": 4, "tensor": 2},
    "data2-expert2-tensor2": {"data": 2, "expert": 2, "tensor": 2},
    "fsdp2-expert4": {"fsdp": 2, "expert": 4},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "expert2-ring2-tensor2": {"expert": 2, "ring": 2, "tensor": 2},
    "fsdp2-ulysses2-expert2": {"fsdp": 2, "expert": 2, "ulysses": 2},
    "data8": {"data": 8},
}


@dataclasses.dataclass(frozen=True)
class Gated:
    """`down((silu(gate(x)) up(x)) weight)`."""

    def __call__(self, local, rows, weight):
        hidden = jax.nn.silu(local.times(rows, "gate")) * local.times(rows, "up")
        return local.times(hidden * weight[:, None].astype(hidden.dtype), "down")


def dense(x, weights, expert, scale):
    """Every expert computes every token, and what was not chosen counts 0."""
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, weights["gate"]))
    hidden = hidden * jnp.einsum("bsd,edf->bsef", x, weights["up"])
    out = jnp.einsum("bsef,efd->bsed", hidden, weights["down"])
    chosen = expert[..., None] == jnp.arange(out.shape[2])
    share = jnp.sum(jnp.where(chosen, scale[..., None], 0.0), axis=2)
    return jnp.einsum("bsed,bse->bsd", out, share)


def arrays():
    """x, the experts, weights of choices, and numbers to weigh the output with."""
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"up": (E, D, F), "gate": (E, D, F), "down": (E, F, D)}
    weights = {
        name: jax.random.normal(key, shape) * shape[1] ** -0.5
        for key, (name, shape) in zip(keys[:3], shapes.items(), strict=True)
    }
    x, by = (jax.random.normal(key, (B, S, D)) for key in keys[3:5])
    return x, weights, jax.random.uniform(keys[5], (B, S, K)), by


def loads():
    """Experts chosen for each token, by the name of how they are spread."""
    even = jnp.stack([jax.random.permutation(key, E)[:K] for key in jax.random.split(_KEY, B * S)])
    even = even.reshape(B, S, K)
    return {
        "even": even,
        "one": jnp.stack([jnp.full((B, S), 3), jnp.full((B, S), E)], axis=-1),
        "starved": jnp.stack([even[..., 0] % 2, 1 - even[..., 0] % 2], axis=-1),
        "padded": jnp.where(jnp.arange(S)[None, :, None] < S // 3, even, E),
        "none": jnp.full((B, S, K), E),
    }


_KEY = jax.random.key(7)
