"""Linear maps, norms, embeddings and MLPs."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.config import nearest
from colossax.errors import InputError, PlanError
from colossax.layerwise import LayerState
from colossax.nn.module import param
from colossax.nn.weights import Weighted
from colossax.pallas.norms import layer_norm, rms_norm
from colossax.sharding import (
    Weight,
    constrain,
    current,
    gather_weight,
    kept_share,
    linears,
    seq_axes,
)
from colossax.typing import Dims

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Linear(Weighted):
    """`x @ w + b` over the last `contract` dims of x; `w` is `[*in, *out]`.

    `w` is a parameter, or a module that has a `weight` (see `with_weights`). Initial weights are
    normal with standard deviation `std`, biases zero.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dims: Dims,
        *,
        rngs: nnx.Rngs,
        contract: int = 1,
        bias: bool = False,
        std: float = 0.02,
    ):
        self.contract = contract
        self.dims = tuple(dims)
        self.w = param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, dims)
        self.b = param(jnp.zeros(shape[contract:], jnp.float32), dims[contract:]) if bias else None

    def __call__(self, x: Float[Array, "*lead_and_in"]) -> Float[Array, "*lead_and_out"]:
        return linears(x, (self.map,), contract=self.contract)[0]

    @property
    def map(self) -> tuple[Weight, Array | None]:
        """Weight and bias, as `colossax.sharding.linears` takes them."""
        return self.weight, None if self.b is None else self.b[...]


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dim, in float32.

    `dim` names the dim that is normalised, `embed` or `head_dim`.
    """

    def __init__(self, size: int, *, eps: float = 1e-6, dim: str = "embed"):
        self.eps = eps
        self.dims = (dim,)
        self.scale = param(jnp.ones((size,), jnp.float32), self.dims)

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = gather_weight(self.scale[...], self.dims, dtype=jnp.dtype("float32"))
        return rms_norm(x, scale, eps=self.eps)


class LayerNorm(nnx.Module):
    """`(x - mean) / std * scale + bias` over the last dim, in float32."""

    def __init__(self, size: int, *, eps: float = 1e-5):
        self.eps = eps
        self.scale = param(jnp.ones((size,), jnp.float32), ("embed",))
        self.bias = param(jnp.zeros((size,), jnp.float32), ("embed",))

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        f32 = jnp.dtype("float32")
        scale = gather_weight(self.scale[...], ("embed",), dtype=f32)
        bias = gather_weight(self.bias[...], ("embed",), dtype=f32)
        return layer_norm(x, scale, bias, eps=self.eps)


class Embedding(Weighted):
    """A table `[rows, embed]` looked up by integers; initially normal with deviation `std`.

    `table` is a parameter, or a module that has a `weight` (see `with_weights`).
    """

    held_as = "table"

    def __init__(self, rows: int, size: int, *, rngs: nnx.Rngs, dim: str, std: float = 0.02):
        self.dims = (dim, "embed")
        self.table = param(
            jax.random.normal(rngs.params(), (rows, size), jnp.float32) * std, self.dims
        )

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return self.weight.rows(ids)


class MLP(nnx.Module):
    """`down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))`."""

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        std: float = 0.02,
        out_std: float | None = None,
    ):
        if activation not in ACTIVATIONS:
            raise InputError(
                f"MLP: activation '{activation}' is unknown{nearest(activation, ACTIVATIONS)}"
            )
        self.activation = activation

        def make(shape: tuple[int, int], dims: Dims, std: float) -> Linear:
            return Linear(shape, dims, rngs=rngs, bias=bias, std=std)

        self.gate = make((embed, mlp), ("embed", "mlp"), std) if gated else None
        self.up = make((embed, mlp), ("embed", "mlp"), std)
        self.down = make((mlp, embed), ("mlp", "embed"), std if out_std is None else out_std)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        parts = [self._tokens(tokens, name) for name, tokens in _split_tokens(x).items()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def mix(
        self, x: Float[Array, "b s d"], side: Any, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        return self(x), state, {}

    def _tokens(self, x: Float[Array, "b s d"], name: str) -> Float[Array, "b s d"]:
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(act(_hidden(self.up(x), name)))
        maps = (self.up.map, self.gate.map)
        up, gate = (_hidden(h, name) for h in linears(x, maps))
        return self.down(act(gate) * up)


def _split_tokens(x: Float[Array, "b s d"]) -> dict[str, Float[Array, "b _ d"]]:
    """By name, the tokens whose hidden states are kept for backward and the others, if any.

    They part before the matmuls: a slice of the hidden states would keep all of them alive.

    Raises:
        PlanError: Several devices hold parts of the sequence.
    """
    share, bound = kept_share(), current()
    if share == 0:
        return {"mlp_recomputed": x}
    if share == 1 or x.shape[1] < 2:
        return {"mlp": x}
    if bound is not None and seq_axes(bound):
        raise PlanError(
            f"segments.mlp_share: {share} parts the tokens of a row, which several devices"
            f" hold along {list(seq_axes(bound))}; keep the 'mlp' of all tokens or of none"
        )
    first = min(max(round(share * x.shape[1]), 1), x.shape[1] - 1)
    return {"mlp": x[:, :first], "mlp_recomputed": x[:, first:]}


def _hidden(h: Float[Array, "b s f"], name: str) -> Float[Array, "b s f"]:
    return checkpoint_name(constrain(h, "batch:inner", "seq", "mlp"), name)


def depth_scaled(std: float, layers: int) -> float:
    """Deviation for a map that adds to the residual stream: `std / sqrt(2 layers)` (GPT-2)."""
    return std / math.sqrt(2 * layers)
