"""A bias that is a function of relative position, computed where scores are: no array of pairs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """`fn(params, q_position - kv_position)`, added to logits; one of `biases`.

    Being a function it travels around a ring of devices, which no array of all pairs can. It is
    differentiated by its parameters. `xla`, `reference` and the schemes of `sharding.sequence`
    compute it; the other kernels decline.

    Attributes:
        params: Arrays of floating point, the query heads first in each: where heads are split, a
            device has those of its own.
        fn: Of params and int32 distances `[...]` makes biases `[heads, ...]`, each of its own
            distance alone. It is part of what is traced: give the same function every time.

    Cost: fn for every pair of every tile that is visited, and its gradient by reverse mode, where
    somebody asks for one; memory of one tile.
    """

    params: Any
    fn: Callable[[Any, Array], Array] = dataclasses.field(metadata={"static": True})

    def replace(self, params: Any) -> "RelativeBias":
        """With other parameters, or with what stands for them in a tree of another kind."""
        return dataclasses.replace(self, params=params)

    def of(
        self, q_position: Int[Array, "*b s"], kv_position: Int[Array, "*c t"]
    ) -> Float[Array, "*d n s t"]:
        """Its values for these tokens, in float32."""
        distance = q_position[..., :, None] - kv_position[..., None, :]
        return jnp.moveaxis(self.fn(self.params, distance), 0, -3).astype(jnp.float32)

    def tile(
        self, q_position: Array, kv_position: Array, kv_heads: int, *, transposed: bool
    ) -> Float[Array, "..."]:
        """What is added to scores `[b, k, g, L, T]` (transposed: `[b, k, T, g, L]`)."""
        bias = self.of(q_position, kv_position)
        b, n, rows, columns = bias.shape
        bias = bias.reshape(b, kv_heads, n // kv_heads, rows, columns)
        return bias.transpose(0, 1, 4, 2, 3) if transposed else bias

    def gradient(
        self, q_position: Array, kv_position: Array, ds: Float[Array, "b k T g L"]
    ) -> "RelativeBias":
        """Of its parameters, from that of one tile of logits."""
        b, k, T, g, L = ds.shape
        wide = ds.transpose(0, 1, 3, 4, 2).reshape(b, k * g, L, T)
        bias, pull = jax.vjp(lambda x: self.replace(x).of(q_position, kv_position), self.params)
        if bias.shape[0] == 1:
            wide = jnp.sum(wide, axis=0, keepdims=True)
        return self.replace(pull(wide)[0])


def why_not_relative(bias: RelativeBias, heads: int) -> str | None:
    """What contradicts `heads` query heads in this bias."""
    shapes = [x.shape for x in jax.tree.leaves(bias.params)]
    strange = next((x for x in shapes if not x or x[0] != heads), None)
    if strange is not None:
        return f"params {strange} have not the {heads} query heads first"
    distance = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    shape = jax.eval_shape(bias.fn, bias.params, distance).shape
    return None if shape == (heads, 2, 3) else f"fn makes {shape} of distances (2, 3)"
