"""The arrays of a training state: their shapes and where they live."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from colossax.config import BoundPlan
from colossax.optim import map_moments
from colossax.sharding import host_sharding, param_sharding, replicated
from colossax.sharding.rules import home
from colossax.step.gradients.loss_scale import LOSS_SCALE, first_scale
from colossax.typing import ParamInfo, TrainState


class StateLayout:
    """Shapes, dtypes and shardings of a state under a plan."""

    def __init__(
        self,
        bound: BoundPlan,
        infos: Any,
        learning: Any,
        optimizer: optax.GradientTransformation,
        variables: Any,
    ):
        """Compute nothing yet.

        Args:
            bound: Plan and devices.
            infos: Of all parameters.
            learning: Of those that the optimizer updates, None elsewhere.
            optimizer: Of those.
            variables: Initial ones.
        """
        self._bound = bound
        self._infos = infos
        self._learning = learning
        self._optimizer = optimizer
        self._variables = variables

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings."""

        def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(placed, self._shapes, self.shardings)

    @functools.cached_property
    def _shapes(self) -> TrainState:
        dtype = self._bound.plan.precision.params
        params = jax.tree.map(
            lambda i: jax.ShapeDtypeStruct(i.shape, i.at_rest(dtype)), self._infos
        )
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return {
            "step": scalar,
            "params": params,
            "opt_state": self.map_moments(lambda leaf, _: leaf, lambda leaf: leaf),
            "variables": jax.eval_shape(lambda: self._variables),
            "rng": jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
            "skipped": scalar,
            **jax.eval_shape(self.first_scale),
        }

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each array lives."""
        everywhere = replicated(self._bound)

        def of_moment(leaf: Any, info: ParamInfo) -> NamedSharding:
            return state_sharding(self._bound, info, leaf.shape)

        return {
            "step": everywhere,
            "params": jax.tree.map(
                lambda info: param_sharding(self._bound, "params", info), self._infos
            ),
            "opt_state": self.map_moments(of_moment, lambda _: everywhere),
            "variables": jax.tree.map(lambda _: everywhere, self._shapes["variables"]),
            "rng": everywhere,
            "skipped": everywhere,
            **self.first_scale(lambda _: everywhere),
        }

    def first_scale(self, put: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
        """Entries of a fresh state for the scale of the loss: none where it is not scaled.

        Args:
            put: Places each array.
        """
        precision = self._bound.plan.precision
        if not precision.scales_loss:
            return {}
        return {LOSS_SCALE: jax.tree.map(put, first_scale(precision.loss_scale))}

    def map_moments(self, of_moment: Callable, of_other: Callable, *, on_disk: bool = False) -> Any:
        """The optimizer state with `of_moment(leaf, info)` for what mirrors a parameter.

        What lies on disk is no part of it, unless asked for.
        """

        def of_leaf(leaf: Any, info: ParamInfo) -> Any:
            if info.placement.optimizer_on_disk and not on_disk:
                return optax.MaskedNode()
            # Masked optimizers hold these in place of the parameters they pass over.
            return leaf if isinstance(leaf, optax.MaskedNode) else of_moment(leaf, info)

        return map_moments(self._optimizer, of_leaf, of_other, self._opt_state, self._learning)

    @functools.cached_property
    def _opt_state(self) -> Any:
        """Shapes of the optimizer's state, what lies on disk included."""
        dtype = self._bound.plan.precision.params
        params = jax.tree.map(
            lambda i: jax.ShapeDtypeStruct(i.shape, i.at_rest(dtype)), self._learning
        )
        return jax.eval_shape(self._optimizer.init, params)

    def constrain(self, state: TrainState) -> TrainState:
        """The state where the plan wants it, in a jit of the user's own as well."""
        if self._bound.single:
            return state

        def lay(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            host = sharding.memory_kind == "pinned_host"
            return x if host else jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(lay, state, self.shardings)


_STAYS = 1024


def state_sharding(bound: BoundPlan, info: ParamInfo, shape: Sequence[int]) -> NamedSharding:
    """Sharding of an array that an optimizer keeps beside a parameter.

    One of the parameter's shape lies as the `optimizer` rules say. Of one with as many dims of
    other sizes (1, or a number for each block) each dim is split as the parameter's where that
    divides it; of any other nothing is. Less than a 1,024th of the parameter stays on the device.
    """
    like = param_sharding(bound, "optimizer", info)
    if tuple(shape) == info.shape:
        return like
    mesh = home(bound, info).mesh
    if len(shape) != len(info.shape):
        return NamedSharding(mesh, PartitionSpec())
    entries = [
        entry if size % math.prod(mesh.shape[axis] for axis in _names(entry)) == 0 else None
        for entry, size in zip(like.spec, shape, strict=True)
    ]
    spec = PartitionSpec(*entries)
    if like.memory_kind == "pinned_host" and math.prod(shape) * _STAYS >= math.prod(info.shape):
        return host_sharding(mesh, spec)
    return NamedSharding(mesh, spec)


def _names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
