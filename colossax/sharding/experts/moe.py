"""A mixture of experts: a router, a gate, and the experts' devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.errors import InputError
from colossax.sharding.context import current
from colossax.sharding.experts.balance import BALANCES, balance_loss, entropy, load, z_loss
from colossax.sharding.experts.by_id import in_host_memory, through_chosen
from colossax.sharding.experts.island import Compute, through_experts
from colossax.sharding.experts.layout import layout_of
from colossax.sharding.experts.routing import Gate, GateInput, row_keys
from colossax.sharding.ops import compute_dtype, constrain, gather_weight
from colossax.sharding.order import current_order
from colossax.typing import Dims


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """All experts of a layer.

    Attributes:
        arrays: By name, dim 0 of each is of experts; at rest.
        dims: Their logical dims, `experts` first; those of features are `expert_embed` and
            `expert_mlp`, mapped apart from the `embed` and `mlp` of what is no expert.
        compute: What an expert does with its rows.
        layer: Where the arrays are those of several layers in host memory, with that dim in front,
            the number of the layer among them, int32; else None.
    """

    arrays: Mapping[str, Array]
    dims: Mapping[str, Dims] = dataclasses.field(metadata={"static": True})
    compute: Compute = dataclasses.field(metadata={"static": True})
    layer: Any = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a layer's arrays, by name."""
        stacked = {
            name: self.layer is not None and in_host_memory(w) for name, w in self.arrays.items()
        }
        return {name: w.shape[stacked[name] :] for name, w in self.arrays.items()}

    @property
    def count(self) -> int:
        """How many experts."""
        return next(iter(self.shapes.values()))[0]

    @property
    def in_host_memory(self) -> bool:
        """Whether they stay there, and those that are chosen are fetched."""
        return any(in_host_memory(w) for w in self.arrays.values())


@runtime_checkable
class Router(Protocol):
    """What scores experts."""

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """Logits in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRouter:
    """`x @ w + b` in float32.

    Attributes:
        w: `[d, e]` at rest, of dims `embed` and `scores`.
        b: `[e]`, or None.
    """

    w: Array
    b: Any = None

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """See `Router`."""
        wide = jnp.dtype("float32")
        logits = x.astype(wide) @ gather_weight(self.w, ("embed", "scores"), dtype=wide)
        return logits if self.b is None else logits + gather_weight(self.b, ("scores",), dtype=wide)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineRouter:
    """Cosine of tokens, in few dims, with a vector of each expert (X-MoE, Chi et al. 2022).

    Attributes:
        w: `[d, r]` at rest.
        vectors: `[r, e]`.
        log_temperature: Scalar; cosines are divided by its exponential.
    """

    w: Array
    vectors: Array
    log_temperature: Array

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """See `Router`."""
        wide = jnp.dtype("float32")
        low = x.astype(wide) @ gather_weight(self.w, ("embed", None), dtype=wide)
        vectors = gather_weight(self.vectors, (None, "scores"), dtype=wide)
        cosine = _unit(low, -1) @ _unit(vectors, 0)
        return cosine / jnp.exp(gather_weight(self.log_temperature, (), dtype=wide))


def _unit(x: Array, axis: int) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=axis, keepdims=True) + 1e-12)


def moe(
    x: Float[Array, "b s d"],
    router: Router,
    experts: ExpertWeights,
    *,
    gate: Gate,
    valid: Bool[Array, "b s"] | None = None,
    token_ids: Int[Array, "b s"] | None = None,
    token_index: Int[Array, "b s"] | None = None,
    key: Array | None = None,
    variables: Mapping[str, Array] | None = None,
    balance: str = "sequence",
    decoding: bool = False,
) -> tuple[Float[Array, "b s d"], dict[str, Any]]:
    """What the chosen experts make of each token, summed by their weights.

    Args:
        x: Laid out as the residual stream, or as a block's input.
        router: Scores experts, in float32.
        experts: Of which it chooses. Of those in host memory each device fetches the chosen, and
            there are no gradients.
        gate: How.
        valid: Which tokens are some; padding is routed nowhere and not counted. Default all.
        token_ids: For gates that go by them.
        token_index: Place of each token in its row; default as the plan in force lays rows out.
        key: Of this layer and step, for gates that draw: one, or one for each row, `[b]`; None:
            without noise.
        variables: `bias` `[e]`, added to scores for the choice; `shares` `[e]`, for `global`.
        balance: What the balance loss compares; see `balance_loss`. `none`: there is none.
        decoding: Whether tokens come one after another, as gates with assignments ask.

    Returns:
        `[b, s, d]`, laid out as x, and sums over tokens: `expert_load` `[e]`, choices of each
        expert, dropped ones among them; `dropped_choices`; `router_entropy`; `router_z_loss`;
        `balance_loss`; and `dispatch_passes`, which is no sum: of several the largest counts.

    Raises:
        InputError: The router scores other experts than there are; an unknown balance.
        PlanError: The plan's devices do not divide experts or tokens.

    Cost: see `through_experts`, or of experts in host memory `through_chosen`.
    """
    if balance not in BALANCES:
        raise InputError(f"moe: balance '{balance}' is unknown; give one of {', '.join(BALANCES)}")
    given = dict(variables or {})
    if balance == "global" and "shares" not in given:
        raise InputError("moe: balance 'global' goes by shares of the step before; give variables")
    x = constrain(x.astype(compute_dtype(x.dtype)), "batch", "seq:residual", "embed")
    logits = constrain(router(x), "batch", "seq:residual", None)
    if logits.shape[-1] != experts.count:
        raise InputError(
            f"moe: the router scores {logits.shape[-1]} experts, and there are {experts.count};"
            " give it as many columns"
        )
    length = x.shape[1]
    if valid is None:
        valid = jnp.ones(x.shape[:2], bool)
    if token_index is None:
        token_index = jnp.broadcast_to(current_order().indices(length), x.shape[:2])
    routing = gate(
        GateInput(
            logits=logits,
            valid=valid,
            token_index=token_index,
            token_ids=token_ids,
            bias=given.get("bias"),
            key=None if key is None else row_keys(key, x.shape[0]),
            decoding=decoding,
        )
    )
    expert, weight = (
        constrain(each, "batch", "seq:residual", None)
        for each in (routing.expert, routing.weight.astype(jnp.float32))
    )
    layout = layout_of(
        current(),
        x.shape,
        expert.shape[-1],
        min(gate.choices, float(experts.count)),
        tuple((name, shape, tuple(experts.dims[name])) for name, shape in experts.shapes.items()),
        x.dtype,
        sends=not experts.in_host_memory,
    )
    if experts.in_host_memory:
        y = through_chosen(
            layout, experts.compute, x, experts.arrays, experts.layer, expert, weight
        )
        passes, dropped = jnp.float32(1), jnp.float32(0)
    else:
        y, passes, dropped = through_experts(
            layout, experts.compute, x, experts.arrays, expert, weight
        )
    sums: dict[str, Any] = {
        "expert_load": jnp.sum(load(routing, valid, experts.count), axis=0),
        "dropped_choices": jax.lax.stop_gradient(dropped + routing.dropped),
        "router_entropy": jax.lax.stop_gradient(entropy(routing, valid)),
        "router_z_loss": z_loss(logits, valid),
        "dispatch_passes": jax.lax.stop_gradient(passes),
    }
    if balance != "none":
        shares = given.get("shares")
        sums["balance_loss"] = balance_loss(routing, valid, over=balance, shares=shares)
    return y, sums
