"""The training step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.nn import ModelSpec, initialise
from colossax.sharding import (
    RowOrder,
    compiler_options,
    in_order,
    param_sharding,
    replicated,
    use,
    validate,
)
from colossax.step.batches import BatchPlacer
from colossax.step.donation import PartlyDonated
from colossax.step.evaluation import batch_totals
from colossax.step.gradients.accumulate import loss_and_gradients
from colossax.step.gradients.reduce_once import check_reduce_once
from colossax.step.loss import Loss, LossCall, Totals
from colossax.step.microbatches import batch_dims
from colossax.step.offloaded.cpu_update import CPU_UPDATE, CpuUpdate
from colossax.step.offloaded.disk import DiskTier
from colossax.step.offloaded.streaming import Pending, Streaming, check_streamable
from colossax.step.trainable import chosen, joined, trainable_tree
from colossax.typing import Batch, Dims, Metrics, ParamInfo, TrainState

Optimizer = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a step does beside loss and optimizer.

    Attributes:
        clip_norm: Gradients are scaled down to this global norm; None leaves them.
        trainable: Says of a parameter whether it learns; the others get neither gradient nor
            optimizer state. None: all do.
        variables: Initial state that changes once per step outside differentiation.
        after_step: `(variables, sums) -> variables`, with `sums` the metrics' (total, weight).
        batch_dims: Logical dims of batch arrays that are not text.
        disk: Folder for the optimizer state that the plan puts on disk. `init` overwrites what is
            there; `step.disk.restore()` goes on from it.
        shapes: A global batch, or the shapes of its arrays: what a `mlp_share` of `auto` is for.
    """

    clip_norm: float | None = None
    trainable: Callable[[ParamInfo], bool] | None = None
    variables: Any = dataclasses.field(default_factory=dict)
    after_step: Callable[[Any, Any], Any] | None = None
    batch_dims: Mapping[str, Dims] | None = None
    disk: Path | None = None
    shapes: Mapping[str, Any] | None = None


class Step:
    """One optimizer step under a plan: `state, metrics = step(state, batch)`.

    The old state is given up. Nothing is allocated until `init`. Steps whose loss or gradient norm
    is not finite leave parameters, optimizer and variables alone and count in `state["skipped"]`.
    Where layers are updated during backward and their norm is not known before (`plan.offload`
    without clipping, or with clipping `layer`), a gradient that is first infinite in layer k comes
    too late for the layers above it: they have moved.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        optimizer: Optimizer,
        loss: Loss,
        options: StepOptions,
        decided: Mapping[str, str] = MappingProxyType({}),
    ):
        """Check and divide; nothing is compiled.

        Args:
            spec: The model.
            bound: Plan and devices.
            optimizer: See `boost`.
            loss: See `boost`.
            options: The rest.
            decided: What was decided for the step by itself, a line for people by setting.
        """
        validate(bound, spec.infos)
        check_reduce_once(bound, spec.infos)
        self.spec = spec
        self.bound = bound
        self.options = options
        self.note = "\n".join(decided.values()) or None
        """What was decided for the step by itself, a line each."""
        self._decided = decided
        self.trainable = trainable_tree(spec.infos, options.trainable)
        self.infos = chosen(spec.infos, self.trainable)
        dims = jax.tree.map(lambda info: info.dims, self.infos)
        self.optimizer = optimizer(dims) if callable(optimizer) else optimizer
        self.loss_call = LossCall(merge=spec.merge, loss=loss)
        self.streaming = self._streaming(optimizer)
        self.batches = BatchPlacer(
            bound, options.batch_dims, any_order=getattr(loss, "any_order", False)
        )
        options_of_compiler = compiler_options(bound) or None
        whole, pure, out = replicated(bound), self.pure, (self.shardings, replicated(bound))
        if self.streaming is not None and self.streaming.later:
            pure = functools.partial(self._pure_streamed, self.streaming)
            out = (*out, self.streaming.pending_shardings(whole))
        compiled: dict[str, Any] = {"out_shardings": out, "compiler_options": options_of_compiler}
        self.jitted = self._jitted(pure, **compiled)
        self.cpu = self._cpu(options_of_compiler)
        self.disk = self._disk()
        self._evaluate = jax.jit(self._losses, compiler_options=options_of_compiler)

    def _jitted(self, pure: Callable, **options: Any) -> Any:
        """The step compiled, its old state given up."""
        if self.streaming is None or self.streaming.clipping != "speculate":
            return jax.jit(pure, donate_argnums=0, **options)
        return PartlyDonated(pure, self.streaming.of_stacks(self.shardings), **options)

    def _streaming(self, optimizer: Optimizer) -> Streaming | None:
        """How layers are updated during backward, where the plan puts any of them elsewhere."""
        plan = self.bound.plan
        if not plan.offload.wanted and all(segment.offload == "none" for segment in plan.segments):
            return None
        check_streamable(self.bound, self.spec.infos, self.infos, optimizer)
        return Streaming(
            self.loss_call,
            self.bound,
            self.spec.infos,
            self.trainable,
            optimizer,  # type: ignore[arg-type]
            self.map_moments,
            self.options.clip_norm,
        )

    def _disk(self) -> DiskTier | None:
        streaming = self.streaming
        if streaming is None or not streaming.on_disk or self.options.disk is None:
            return None
        return DiskTier(streaming, self.abstract, Path(self.options.disk))

    def _cpu(self, options: Any) -> CpuUpdate | None:
        """How the CPU takes its share, where the plan gives it any."""
        if self.streaming is not None and self.streaming.on_cpu:
            return CpuUpdate(self.streaming, self.shardings, options)
        share = self.bound.plan.offload.cpu_update
        there = self.streaming is not None and any(
            part.on_host for part in self.streaming.parts.values()
        )
        if CPU_UPDATE not in self._decided and isinstance(share, float) and share > 0 and not there:
            raise PlanError(
                f"plan.offload.cpu_update: found {share}, and no layer has parameters and optimizer"
                " state in host memory; put layers there, or give off or auto"
            )
        return None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one step; host arrays in the batch are placed first.

        Raises:
            InputError: The batch's shapes are not those the step was compiled for.
            OffloadError: Disk or CPU failed to update what is theirs.
        """
        state, metrics, *rest = self.jitted(state, self.place(batch))
        for pending in rest:
            if self.cpu is not None:
                state = self.cpu.update(state, pending)
            if self.disk is not None:
                state = self.disk.update(state, pending)
        return state, metrics

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """The lowered step, for compiling without running; arguments may be abstract."""
        return self.jitted.lower(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Terms and metrics of a batch as (total, weight), without a step.

        Cut into microbatches like a step's batch; a loss that takes a key gets None.
        """
        return self._evaluate(state["params"], state["variables"], self.place(batch))

    def model(self, state: TrainState) -> Any:
        """The NNX model holding the state's parameters (the same arrays)."""
        return self.spec.merge(state["params"])

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, each array made where it lives. The mesh does not change the values."""
        key = jax.random.key(seed)
        params = initialise(self.spec, self.bound, jax.random.fold_in(key, 0))
        return self.init_from(params, seed)

    def init_from(self, params: Any, seed: int = 0) -> TrainState:
        """A state at step 0 with these parameters, already laid out by the plan."""
        opt_state = self._init_optimizer(params)
        if self.disk is None and self.streaming is not None and self.streaming.on_disk:
            raise PlanError(
                "plan.offload.disk: it is not said where; give a folder as disk=FOLDER, or put the"
                " optimizer's state in host memory"
            )
        put = functools.partial(jax.device_put, device=replicated(self.bound))
        rng = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
        state = {
            "step": put(jnp.int32(0)),
            "params": params,
            "opt_state": opt_state,
            # A copy: the first step donates its state.
            "variables": jax.tree.map(lambda x: put(jnp.array(x)), self.options.variables),
            "rng": put(rng),
            "skipped": put(jnp.int32(0)),
        }
        if self.disk is not None:
            self.disk.fill(state)
        return state

    def _init_optimizer(self, params: Any) -> Any:
        shardings = self.shardings["opt_state"]
        if self.streaming is not None:
            return self.streaming.init_state(params, shardings)
        return jax.jit(self.optimizer.init, out_shardings=shardings)(chosen(params, self.trainable))

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""

        def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(placed, self._shapes_of_state, self.shardings)

    @functools.cached_property
    def _shapes_of_state(self) -> TrainState:
        dtype = self.bound.plan.precision.params
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), self.spec.infos)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return {
            "step": scalar,
            "params": params,
            "opt_state": self.map_moments(lambda leaf, _: leaf, lambda leaf: leaf),
            "variables": jax.eval_shape(lambda: self.options.variables),
            "rng": jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
            "skipped": scalar,
        }

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each array of the state lives."""
        whole = replicated(self.bound)

        def of_moment(leaf: Any, info: ParamInfo) -> NamedSharding:
            mirrors = leaf.shape == info.shape
            return param_sharding(self.bound, "optimizer", info) if mirrors else whole

        return {
            "step": whole,
            "params": jax.tree.map(
                lambda info: param_sharding(self.bound, "params", info), self.spec.infos
            ),
            "opt_state": self.map_moments(of_moment, lambda _: whole),
            "variables": jax.tree.map(lambda _: whole, self._shapes_of_state["variables"]),
            "rng": whole,
            "skipped": whole,
        }

    def map_moments(self, of_moment: Callable, of_other: Callable, *, on_disk: bool = False) -> Any:
        """The optimizer state with `of_moment(leaf, info)` for what mirrors a parameter.

        What lies on disk is no part of it, unless asked for.
        """

        def of_leaf(leaf: Any, info: ParamInfo) -> Any:
            if "disk" in info.host and not on_disk:
                return optax.MaskedNode()
            # Masked optimizers hold these in place of the parameters they pass over.
            return leaf if isinstance(leaf, optax.MaskedNode) else of_moment(leaf, info)

        return optax.tree_utils.tree_map_params(
            self.optimizer.init,
            of_leaf,
            self._whole_opt_state,
            self.infos,
            transform_non_params=of_other,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )

    @functools.cached_property
    def _whole_opt_state(self) -> Any:
        """Shapes of the optimizer's state, what lies on disk included."""
        dtype = self.bound.plan.precision.params
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), self.infos)
        return jax.eval_shape(self.optimizer.init, params)

    def place(self, batch: Batch) -> Batch:
        """A global batch on the devices; see `BatchPlacer.place`."""
        return self.batches.place(batch)

    def order(self, length: int) -> RowOrder:
        """The order in which the step wants rows of this many tokens; see `BatchPlacer.order`."""
        return self.batches.order(length)

    def arrange(self, batch: Batch) -> Batch:
        """Arrays in natural order brought into that of the step, on the host or in a trace."""
        return self.batches.arrange(batch)

    def abstract_batch(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Batch:
        """A global batch without its numbers, arranged and laid out by the plan: for `lower`."""
        return self.batches.abstract(shapes)

    def _losses(self, params: Any, variables: Any, batch: Batch) -> dict[str, Any]:
        batch, order = self.batches.in_order(batch)
        dims = batch_dims(batch, self.options.batch_dims)
        with use(self.bound), in_order(order):
            return batch_totals(self.loss_call, self.bound, params, batch, dims, variables)

    def _split(self, params: Any) -> tuple[Any, Any]:
        """Trainable and frozen parameters, None in place of the others."""
        others = jax.tree.map(lambda t: not t, self.trainable)
        return chosen(params, self.trainable), chosen(params, others)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Any, Any, Any, jax.Array]:
        """What the optimizer would get for this batch, before clipping; pure.

        Returns:
            Gradients of the trainable parameters (None elsewhere), terms and metrics as
            (total, weight) over the whole global batch, and the loss.
        """
        batch, order = self.batches.in_order(batch)
        with use(self.bound), in_order(order):
            params, frozen = self._split(state["params"])
            key = _step_key(state)
            dims = batch_dims(batch, self.options.batch_dims)
            if self.streaming is not None:
                leaves, found = self.streaming.gradients(state, batch, dims, key)
                grads = jax.tree.unflatten(jax.tree.structure(state["params"]), leaves)
                return grads, found.totals, found.sums, found.loss
            return loss_and_gradients(
                self.loss_call,
                self.bound,
                self.infos,
                params,
                frozen,
                batch,
                dims,
                state["variables"],
                key,
            )

    def pure(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step as a pure function, to be called inside a jit of your own."""
        if self.streaming is not None:
            if self.streaming.later:
                raise PlanError(
                    "plan.offload: a step whose optimizer state lies on disk, or of which the CPU"
                    " updates a share, is no pure function; call the step itself, or give disk=0"
                    " and cpu_update off"
                )
            return self._pure_streamed(self.streaming, state, batch)[:2]
        grads, totals, sums, loss = self.gradients(state, batch)
        params, frozen = self._split(state["params"])
        norm = optax.tree_utils.tree_norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        if self.options.clip_norm is not None:
            scale = jnp.minimum(1.0, self.options.clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = self.optimizer.update(grads, state["opt_state"], params)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = {
            "params": joined(optax.apply_updates(params, updates), frozen),
            "opt_state": opt_state,
        }
        new = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), new, {name: state[name] for name in new}
        )
        return self._concluded(state, new, finite, totals, sums, loss, norm)

    def _pure_streamed(
        self, streaming: Streaming, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics, Pending | None]:
        batch, order = self.batches.in_order(batch)
        with use(self.bound), in_order(order):
            dims = batch_dims(batch, self.options.batch_dims)
            params, opt_state, found, ok, pending = streaming.step(
                state, batch, dims, _step_key(state)
            )
        new = {"params": params, "opt_state": opt_state}
        done = self._concluded(state, new, ok, found.totals, found.sums, found.loss, found.norm)
        return *done, pending

    def _concluded(
        self,
        state: TrainState,
        new: dict[str, Any],
        finite: jax.Array,
        totals: Totals,
        sums: Totals,
        loss: jax.Array,
        norm: jax.Array,
    ) -> tuple[TrainState, Metrics]:
        """The whole state after a step, and its metrics."""
        new["variables"] = state["variables"]
        if self.options.after_step is not None:
            changed = self.options.after_step(state["variables"], sums)
            new["variables"] = jax.tree.map(
                lambda a, b: jnp.where(finite, a, b), changed, state["variables"]
            )
        skipped = state["skipped"] + jnp.where(finite, 0, 1)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "tokens": functools.reduce(jnp.maximum, [weight for _, weight in totals.values()]),
            "skipped": skipped.astype(jnp.float32),
            **{name: _mean(*pair) for name, pair in {**totals, **sums}.items()},
        }
        rest = {"step": state["step"] + 1, "rng": state["rng"], "skipped": skipped}
        return self._laid_out({**new, **rest}), metrics

    def _laid_out(self, state: TrainState) -> TrainState:
        """The state where the plan wants it, in a jit of the user's own as well."""
        if self.bound.single:
            return state

        def lay(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            host = sharding.memory_kind == "pinned_host"
            return x if host else jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(lay, state, self.shardings)


def _step_key(state: TrainState) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])


def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight > 0, weight, 1.0)
