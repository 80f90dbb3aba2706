"""Parameters that are updated together: a layer's, or those in no layer stack."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from colossax.config import BoundPlan, MeshAxis
from colossax.layerwise import Key, Stacks
from colossax.offload import build_stack, fetch, new_stack, on_host, store
from colossax.optim import DimsOptimizer, applied, decays
from colossax.sharding import host_sharding, param_sharding, reduction_dtype
from colossax.step.state import state_sharding
from colossax.typing import ParamInfo

SHARED = -1
"""Owner of optimizer state that belongs to no parameter: counters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What the update of every parameter needs beside its own arrays.

    Attributes:
        shared: Optimizer state that belongs to no parameter.
        scale: Gradients are multiplied by it, a float32 scalar; None: as they are.
        ok: Whether to update at all, a boolean scalar.
        rounding: See `colossax.optim.applied`; None: to the nearest.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    shared: list[Any]
    scale: Any
    ok: Any
    rounding: Any = None


jax.tree_util.register_dataclass(Update, ["shared", "scale", "ok", "rounding"], [])


class Part:
    """Parameters that are updated together: a layer of a segment, or all outside of segments.

    Its arrays are lists in the order of the parameters' tree. Of layers that the stages of a
    pipeline share, one of each stage is updated at a time: what is said of a layer is meant of
    those, whose arrays have a dim of stages in front.

    Attributes:
        key: The segment; None outside.
        at: Numbers of its parameters among all, and `trained` of those that learn.
        infos: Of those that learn, as of one layer.
        count: Layers.
        stacked: Whether arrays have a dim of layers in front.
        on_disk: Whether its optimizer state is in a file.
        on_cpu: Whether the CPU updates it.
        state_on_host: Whether any of its optimizer state is in host memory.
        on_host: Whether that and any parameters are.
        slots: Numbers of its leaves among those of the optimizer's state, without the shared.
    """

    def __init__(
        self,
        key: Key | None,
        infos: Sequence[ParamInfo],
        learns: Sequence[bool],
        owners: Sequence[int],
        bound: BoundPlan,
        optimizer: DimsOptimizer,
    ):
        self.key = key
        self.bound = bound
        self.at = [i for i, info in enumerate(infos) if info.segment == key]
        self.trained = [i for i in self.at if learns[i]]
        first = infos[self.at[0]] if self.at and key is not None else None
        self.stacked = first is not None and first.stacked
        self._stages = bound.mesh.shape[MeshAxis.STAGE] if self.stacked else 1
        self._axis = 0 if self._stages == 1 else 1
        self.count = 1 if first is None else first.layer_count // self._stages
        self.infos = [self._of_layer(infos[i]) if self.stacked else infos[i] for i in self.trained]
        learning = [infos[i] for i in self.trained]
        self.on_disk = any(info.placement.optimizer_on_disk for info in learning)
        self.on_cpu = any(info.placement.updated_by_cpu for info in learning)
        self._state_on_host = [info.optimizer_on_host for info in learning]
        self.state_on_host = any(self._state_on_host)
        self.on_host = any(info.placement.cpu_can_update and not info.resident for info in learning)
        self.slots = [j for j, owner in enumerate(owners) if owner in self.trained]
        self._owners = owners
        self._order = [j for j, owner in enumerate(owners) if owner in (SHARED, *self.trained)]
        self._own = [info.update for info in self.infos]
        self._optimizer = optimizer(self._named([info.named_dims for info in self.infos]))

    def _of_layer(self, info: ParamInfo) -> ParamInfo:
        """One layer's part of a stacked parameter, as the device gets it."""
        dims, shape = info.dims[1:], info.shape[1:]
        if self._stages > 1:
            dims, shape = info.dims, (self._stages, *shape)
        return dataclasses.replace(info.on_device(), dims=dims, shape=shape)

    def init(self) -> list[Array]:
        """Optimizer state of one layer, without the shared."""
        return self._split(self._initial())[0]

    def init_shared(self) -> list[Array]:
        """Optimizer state that belongs to no parameter."""
        return self._split(self._initial())[1]

    def _initial(self) -> Any:
        dtype = self.bound.plan.precision.params
        zeros = [jnp.zeros(info.shape, info.at_rest(dtype)) for info in self.infos]
        return self._optimizer.init(self._named(zeros))

    def pick(self, leaves: Any) -> list[Array]:
        """Those that learn, of a tree of its parameters."""
        every = dict(zip(self.at, jax.tree.leaves(leaves), strict=True))
        return [every[i] for i in self.trained]

    def stored(self, stacks: Any, rows: list[Array], row: Any) -> Any:
        """A tree of its parameters' stacks with this row of those that learn replaced."""
        leaves, structure = jax.tree.flatten(stacks)
        new = store(self.pick(stacks), rows, row, stacked=self.stacked)
        for i, stack in zip(self.trained, new, strict=True):
            leaves[self.at.index(i)] = stack
        return jax.tree.unflatten(structure, leaves)

    def init_stacks(self, where: Sequence[NamedSharding]) -> list[Array]:
        """Optimizer state of all layers, made where it lives.

        Args:
            where: Shardings of its stacks.
        """
        if not self.stacked:
            return self.init()
        hosts = [sharding.memory_kind == "pinned_host" for sharding in where]
        rows = None if self.bound.single else [self.row_sharding(each) for each in where]
        stacks = build_stack(lambda _: self.init(), self.count, hosts, rows, axis=self._axis)
        return self._flat(stacks)

    def gradients(self, grads: Sequence[Array]) -> list[Array]:
        """Gradients in the dtype in which they are accumulated, laid out by the plan."""
        dtype = self.bound.plan.precision.accumulation
        return self._constrained([g.astype(dtype) for g in grads], "gradients")

    def update(
        self,
        params: list[Array],
        state: list[Array],
        grads: list[Array],
        update: Update,
        row: Any = 0,
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """New parameters, state and shared state; the old ones where it may not update.

        Args:
            params: Of those that learn.
            state: Without the shared.
            grads: Like the parameters.
            update: Scale and shared state.
            row: Number of the layer among those that are updated one after another.
        """
        # Else norms may be of parameters as gathered for the layer, unsharded.
        params = self._constrained(params, "params")
        scaled = grads
        if update.scale is not None:
            scaled = [(g * update.scale).astype(g.dtype) for g in grads]
        opt_state = self._joined(state, update.shared)
        named = self._named(params)
        steps, new = self._optimizer.update(self._named(scaled), opt_state, named)
        rows: Any = {"row": row, "stride": self.count}
        new_params = applied(self._named(self.infos), named, steps, update.rounding, **rows)
        by_optimizer = iter(new_params.values())
        moved = [
            next(by_optimizer) if own is None else self._by_own_rule(own, value, grad)
            for own, value, grad in zip(self._own, params, grads, strict=True)
        ]
        new_state, shared = self._split(new)
        params, new_state, shared = jax.tree.map(
            lambda a, b: jnp.where(update.ok, a, b),
            (moved, new_state, shared),
            (params, state, update.shared),
        )
        return self._constrained(params, "params"), self._state_constrained(new_state), shared

    def _by_own_rule(self, own: Callable, value: Array, grad: Array) -> Array:
        """What its type makes of a parameter, or of that of a layer of each stage."""
        rule = jax.vmap(own) if self._stages > 1 else own
        return rule(value, grad).astype(value.dtype)

    def squares(self, grads: Sequence[Array]) -> Float[Array, ""]:
        """Sum of the squares of all that the optimizer takes, in float32."""
        pairs = zip(grads, self._own, strict=True)
        plain = [g.astype(jnp.float32) for g, own in pairs if own is None]
        return functools.reduce(jnp.add, [jnp.sum(jnp.square(g)) for g in plain], jnp.float32(0))

    def state_shardings(self) -> list[NamedSharding | None]:
        """Of each leaf of a layer's optimizer state; None on a single device."""
        shapes = jax.eval_shape(self.init)
        if self.bound.single:
            return [None] * len(shapes)
        infos = dict(zip(self.trained, self.infos, strict=True))
        return [
            state_sharding(self.bound, infos[self._owners[slot]].on_device(), leaf.shape)
            for slot, leaf in zip(self.slots, shapes, strict=True)
        ]

    def _row_shardings(self, role: str) -> list[NamedSharding | None]:
        """On the device, of a layer's parameters or what mirrors them; None on a single device."""
        if self.bound.single:
            return [None] * len(self.infos)
        return [param_sharding(self.bound, role, info.on_device()) for info in self.infos]

    def row_sharding(self, stack: Any) -> NamedSharding | None:
        """Of a row of a stack that is laid out like this; None on a single device."""
        if self.bound.single:
            return None
        spec = stack.spec[1:] if self.stacked and self._stages == 1 else stack.spec
        return NamedSharding(self.bound.mesh, PartitionSpec(*spec))

    def _named(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Those that the optimizer takes: what has a rule of its own is left out."""
        # Numbered so that the tree's order, which sorts keys, is that of the lists.
        found = zip(self.trained, leaves, self._own, strict=True)
        return {f"{i:06}": leaf for i, leaf, own in found if own is None}

    @functools.cached_property
    def _structure(self) -> Any:
        return jax.tree.structure(jax.eval_shape(self._initial))

    def _joined(self, state: Sequence[Array], shared: Sequence[Array]) -> Any:
        mine, others = iter(state), iter(shared)
        slots = set(self.slots)
        leaves = [next(mine) if j in slots else next(others) for j in self._order]
        return jax.tree.unflatten(self._structure, leaves)

    def _split(self, state: Any) -> tuple[list[Array], list[Array]]:
        slots = set(self.slots)
        pairs = list(zip(self._order, jax.tree.leaves(state), strict=True))
        return [x for j, x in pairs if j in slots], [x for j, x in pairs if j not in slots]

    def _state_constrained(self, state: list[Array]) -> list[Array]:
        """As its stacks are: else they may be laid out anew, in host memory, by the host."""
        return _constrained(state, self.state_shardings())

    def _constrained(self, leaves: list[Array], role: str) -> list[Array]:
        return _constrained(leaves, self._row_shardings(role))

    def gradient_stacks(self, *, summed: bool) -> list[Array]:
        """Room for the gradients of all layers, beside the optimizer's state.

        Args:
            summed: Whether several are added up. Else they keep the dtype they are computed in.
        """
        precision = self.bound.plan.precision
        kept = jnp.dtype(precision.accumulation)
        reduction = reduction_dtype(self.bound, jnp.dtype(precision.compute))
        # Vectors are few, and their gradients may be sums in float32.
        narrow = reduction.itemsize < kept.itemsize and not summed
        dtypes = [reduction if narrow and decays(info.dims) else kept for info in self.infos]
        return [
            new_stack(
                self.count,
                jax.ShapeDtypeStruct(info.shape, dtype),
                host=host,
                stacked=self.stacked,
                sharding=sharding,
            )
            for info, dtype, host, sharding in zip(
                self.infos,
                dtypes,
                self._state_on_host,
                self._row_shardings("gradients"),
                strict=True,
            )
        ]

    def gradient_stack_bytes(self, *, summed: bool) -> int:
        """Bytes of a device's part of `gradient_stacks` in host memory."""
        stacks = jax.eval_shape(lambda: self.gradient_stacks(summed=summed))
        return sum(
            math.prod(sharding.shard_shape(stack.shape)) * stack.dtype.itemsize
            for stack, sharding in zip(stacks, self.gradient_shardings(), strict=True)
            if sharding.memory_kind == "pinned_host"
        )

    def gradient_shardings(self) -> list[NamedSharding]:
        """Of `gradient_stacks`."""
        shardings = []
        for info, away in zip(self.infos, self._state_on_host, strict=True):
            lead = (None,) if self.stacked else ()
            plain = info.on_device()
            spec = PartitionSpec(*lead, *param_sharding(self.bound, "gradients", plain).spec)
            mesh = self.bound.mesh
            shardings.append(host_sharding(mesh, spec) if away else NamedSharding(mesh, spec))
        return shardings

    def visit_all(self, stacks: Stacks, update: Update) -> Stacks:
        """Every layer updated with the gradients in `stacks.grads`."""

        how: Any = {"stacked": self.stacked, "axis": self._axis}
        kept = self._by_stage(stacks.grads)

        def step(i: Any, loop: Any) -> Any:
            params, state = loop
            grads = fetch(kept, i, **how)
            moved, new_state, _ = self.update(
                fetch(params, i, **how), fetch(state, i, **how), self.gradients(grads), update, i
            )
            return store(params, moved, i, **how), store(state, new_state, i, **how)

        start = self._by_stage((stacks.params, stacks.state))
        loop = jax.lax.fori_loop(0, self.count, step, start) if self.stacked else step(0, start)
        params, state = self._flat(loop)
        return dataclasses.replace(stacks, params=params, state=state)

    def _by_stage(self, stacks: Any) -> Any:
        """`[layers, ...]` as `[stages, layers of a stage, ...]`, where stages share them."""
        if self._stages == 1:
            return stacks
        shape = (self._stages, self.count)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stacks)

    def _flat(self, stacks: Any) -> Any:
        """What `_by_stage` undoes."""
        if self._stages == 1:
            return stacks
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacks)

    def copies(self, stacks: Stacks) -> tuple[list[Array], list[Array]]:
        """Room for a second copy of parameters and state, each beside the first."""
        params = self._row_shardings("params")
        return self._like(stacks.params, params), self._like(stacks.state, self.state_shardings())

    def _like(self, stacks: list[Array], shardings: Sequence[Any]) -> list[Array]:
        return [
            new_stack(
                self.count,
                jax.ShapeDtypeStruct(stack.shape[self.stacked :], stack.dtype),
                host=on_host(stack),
                stacked=self.stacked,
                sharding=sharding,
            )
            for stack, sharding in zip(stacks, shardings, strict=True)
        ]


def _constrained(leaves: list[Array], shardings: Sequence[NamedSharding | None]) -> list[Array]:
    pairs = zip(leaves, shardings, strict=True)
    return [x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in pairs]
