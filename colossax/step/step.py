"""The training step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from colossax.config import BoundPlan, to_json
from colossax.errors import InputError, PlanError
from colossax.nn import ModelSpec, describe, initialise, renamed, with_gathers
from colossax.optim import Optimizer, check_groups, transformation
from colossax.sharding import RowOrder, compiler_options, in_order, replicated, use, validate
from colossax.sharding.table import explain, explain_html
from colossax.step.batches import BatchPlacer
from colossax.step.checks.float8 import check_float8
from colossax.step.checks.given import check_state, known_to
from colossax.step.choosing import followers_of, gradient_method_of, updater_of
from colossax.step.evaluation import Evaluation
from colossax.step.gradients.accumulate import LossCall, with_term_weights
from colossax.step.gradients.loss_scale import scale_in
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.loss import Loss
from colossax.step.microbatches import Microbatches, batch_dims, cut_up
from colossax.step.offloaded.cpu_update import CpuUpdate
from colossax.step.offloaded.disk import DiskTier
from colossax.step.offloaded.streaming import Streaming
from colossax.step.options import StepOptions
from colossax.step.prepare import Preparation, preparation
from colossax.step.saving.own import OwnSaves, Saving
from colossax.step.saving.records import StateRecords
from colossax.step.stages import check_stages
from colossax.step.state import StateLayout
from colossax.step.trainable import chosen, optimised, split, trainable_tree
from colossax.step.updaters import Updated, Updater, WholeRule, concluded
from colossax.typing import Batch, Metrics, ParamInfo, Params, TrainState


class WholeUpdate(WholeRule):
    """All parameters at once, when the gradients of the whole batch are there."""

    def __init__(self, gradients: GradientMethod, *rule: Any):
        """Bind; nothing is traced.

        Args:
            gradients: How to get them.
            *rule: See `WholeRule`.
        """
        super().__init__(*rule)
        self.gradients = gradients

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """See `Updater`."""
        return self.updated(state, self.gradients(state["params"], state["variables"], micro))

    def pending_shardings(self, replicated: Any) -> None:
        """Nothing is left."""
        return None

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> Any:
        """See `Updater`."""
        return jax.jit(pure, donate_argnums=0, **options)


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
        reasons: Mapping[str, str] = MappingProxyType({}),
    ):
        """Check and divide; nothing is compiled.

        Args:
            spec: The model.
            bound: Plan and devices.
            optimizer: See `boost`.
            loss: See `boost`.
            options: The rest.
            reasons: Why the plan is as it is: by setting that was decided, a line for people.
        """
        check_stages(bound)
        validate(bound, spec.infos)
        check_float8(bound, spec)
        self.spec = spec
        self.bound = bound
        self.options = options
        self.note = "\n".join(reasons.values()) or None
        """What of the plan was decided and not given, a line each."""
        self.trainable = trainable_tree(spec.infos, options.trainable)
        self.infos = chosen(spec.infos, self.trainable)
        learning = optimised(self.infos)
        dims = jax.tree.map(lambda info: info.named_dims, learning)
        check_groups(optimizer, dims)
        self.optimizer = transformation(optimizer, dims)
        gathering = with_gathers(spec)
        self.loss_call = LossCall(merge=gathering.merge, loss=loss)
        self.prepared = preparation(gathering.merge, options.prepare)
        self.layout = StateLayout(bound, spec.infos, learning, self.optimizer, options.variables)
        whole = (self.optimizer, spec.infos, self.trainable, options.clip_norm)
        self.updater: Updater = updater_of(self, optimizer) or WholeUpdate(
            gradient_method_of(self), *whole
        )
        any_order, known = getattr(loss, "any_order", False), known_to(spec)
        self.batches = BatchPlacer(bound, options.batch_dims, any_order=any_order, known=known)
        compiler = compiler_options(bound) or None
        everywhere = replicated(bound)
        out: tuple[Any, ...] = (self.shardings, everywhere)
        pending = self.updater.pending_shardings(everywhere)
        self._leaves_work = pending is not None
        self.jitted = self.updater.jitted(
            self._with_pending if self._leaves_work else self.pure,
            self.shardings,
            out_shardings=(*out, pending) if self._leaves_work else out,
            compiler_options=compiler,
        )
        self.followers = followers_of(self, compiler)
        self.evaluation = Evaluation(self, compiler)
        self._preparation = Preparation(self, compiler)

    def __repr__(self) -> str:
        return explain(self.bound, self.spec.infos)

    def _repr_html_(self) -> str:
        return explain_html(self.bound, self.spec.infos)

    @property
    def streaming(self) -> Streaming | None:
        """How layers are updated during backward, where the plan puts any of them elsewhere."""
        return self.updater if isinstance(self.updater, Streaming) else None

    @property
    def cpu(self) -> CpuUpdate | None:
        """How the CPU takes its share, where it has any."""
        return next((one for one in self.followers if isinstance(one, CpuUpdate)), None)

    @property
    def disk(self) -> DiskTier | None:
        """The optimizer state on disk, where there is any."""
        return next((one for one in self.followers if isinstance(one, DiskTier)), None)

    @property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.layout.abstract

    @property
    def shardings(self) -> TrainState:
        """Where each array of the state lives."""
        return self.layout.shardings

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one step; host arrays in the batch are placed first.

        Raises:
            InputError: The batch's shapes are not those the step was compiled for, or the state
                is another's, or was given to a step before.
            OffloadError: Disk or CPU failed to update what is theirs.
        """
        check_state(state, self.abstract)
        state, metrics, *pending = self.jitted(state, self.place(batch))
        for work in pending:
            for follower in self.followers:
                state = follower.update(state, work, metrics)
        return state, metrics

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """The lowered step, for compiling without running; arguments may be abstract."""
        return self.jitted.lower(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Terms and metrics of a batch as (total, weight), without a step.

        Any number of rows; a program is compiled for each. Where microbatches and devices do not
        divide them, copies of the last row fill them up and are taken off again, to float32: rows
        must not see one another then. A loss that takes a key gets None.

        Raises:
            InputError: See `__call__`; or rows are added and the loss is one number.
        """
        check_state(state, self.abstract, ("params", "variables"))
        return self.evaluation(state, batch)

    def prepare(self, state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        """What `prepare` adds to a batch by this state, to take several steps of it: for a
        `prepare` that leaves alone what is there, as those of `colossax.tasks` do.

        Returns:
            Of each array the whole on every device, tokens in natural order.

        Raises:
            InputError: See `__call__`; or the step has no `prepare`.
        """
        check_state(state, self.abstract, ("params", "variables"))
        return self._preparation(state, batch)

    def model(self, state: TrainState) -> Any:
        """The NNX model, or the `Models`, holding the state's parameters (the same arrays)."""
        check_state(state, self.abstract, ("params",))
        return self.spec.merge(state["params"])

    def spec_of(self, name: str) -> ModelSpec:
        """One of several models: `Generator(step.spec_of("actor"), step.bound, params["actor"])`.

        As if it were described alone, under the step's plan.

        Raises:
            InputError: There is none of that name.
        """
        names = self.spec.model_names
        if name not in names:
            raise InputError(
                f"model '{name}': there is none of that name; the state holds"
                f" {', '.join(map(repr, names)) or 'one model without a name'}"
            )
        with use(self.bound):
            spec = describe(lambda rngs: getattr(self.spec.make_model(rngs), name))
        return renamed(_numbered_alone(spec), self.spec.infos[name])

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, each array made where it lives. The mesh does not change the values."""
        return self.init_from(self.fresh_params(seed), seed)

    def fresh_params(
        self, seed: int = 0, *, only: Callable[[ParamInfo], bool] | None = None
    ) -> Params:
        """Those of `init`; see `colossax.nn.initialise`."""
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return initialise(self.spec, self.bound, key, only=only)

    def init_from(self, params: Any, seed: int = 0) -> TrainState:
        """A state at step 0 with these parameters, already laid out by the plan."""
        opt_state = self.updater.init_state(params, self.shardings["opt_state"])
        disk = self.disk
        if disk is None and self.streaming is not None and self.streaming.on_disk:
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
            **self.layout.first_scale(put),
        }
        if disk is not None:
            disk.fill(state)
        return state

    def save(
        self, folder: Path | str, state: TrainState, *, keep: int | None = None, wait: bool = True
    ) -> Saving:
        """Save a state as `folder/<its step count>`; every process calls this alike.

        That folder appears whole or not at all, and holds what a run's checkpoints hold.

        Args:
            folder: Holds one folder for each state.
            state: Stays as it is.
            keep: How many of the latest in the folder to keep; None keeps all.
            wait: Until it is written. False: until the arrays are copied to host memory, as many
                as this process writes; those that live there are written before it returns.

        Returns:
            What to `wait()` for; the next `save` or `restore` does so too.

        Raises:
            CheckpointError: One of this step count is there, or it cannot be written; this one,
                or one that was not waited for.
            InputError: The state was given to a step.
        """
        check_state(state, self.abstract)
        return self._saves.save(folder, state, keep=keep, wait=wait)

    def restore(
        self, folder: Path | str, *, at: int | None = None, base: Params | None = None
    ) -> TrainState:
        """A saved state, laid out by this step's plan; each device reads its own shards.

        Args:
            folder: As given to `save`, or a run's `checkpoints`.
            at: Step count; None is the latest.
            base: Of a model with an adapter, parameters laid out by this step's plan, of which
                those that are frozen are taken: the checkpoint has none of them.

        Raises:
            CheckpointError: It is not there, damaged, or of another model or optimizer.
            InputError: There is an adapter, and no base.
        """
        return self._saves.restore(folder, at, base)

    @functools.cached_property
    def _saves(self) -> OwnSaves:
        return OwnSaves(StateRecords(self), {"plan": to_json(self.bound.plan)})

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

    def gradients(self, state: TrainState, batch: Batch) -> Gradients:
        """What the update would get for this batch, before clipping, without a scale; pure."""
        batch, order = self.batches.in_order(batch)
        with use(self.bound), in_order(order):
            micro = self.microbatches(state, batch)
            found = self.updater.gradients(state["params"], state["variables"], micro)
        return found.unscaled(self.infos)

    def pure(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step as a pure function, to be called inside a jit of your own."""
        if self._leaves_work:
            raise PlanError(
                "plan.offload: a step whose optimizer state lies on disk, or of which the CPU"
                " updates a share, is no pure function; call the step itself, or give disk=0"
                " and cpu_update off"
            )
        return self._with_pending(state, batch)[:2]

    def _with_pending(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Any]:
        """The step's program, and what it leaves to its followers."""
        batch, order = self.batches.in_order(batch)
        with use(self.bound), in_order(order):
            updated = self.updater.update(state, self.microbatches(state, batch))
        new, metrics = concluded(
            self.options.after_step, state, updated, self.bound.plan.precision.loss_scale
        )
        return self.layout.constrain(new), metrics, updated.pending

    def microbatches(self, state: TrainState, batch: Batch) -> Microbatches:
        """The batch, in the order of the step, prepared and cut up; with the plan in force."""
        batch = self.prepared(state["params"], state["variables"], batch)
        dims = batch_dims(batch, self.options.batch_dims)
        key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        micro = cut_up(
            self.bound,
            batch,
            dims,
            key,
            by_row=self.loss_call.by_row,
            loss_scale=scale_in(state),
        )
        parts = split(state["params"], self.trainable)
        return with_term_weights(self.loss_call, *parts, state["variables"], micro)


def _numbered_alone(spec: ModelSpec) -> ModelSpec:
    """Its layers numbered among themselves, not behind those of models that were made before."""
    spans = [info.span for info in jax.tree.leaves(spec.infos) if info.span is not None]
    before = min((first for first, _ in spans), default=0)

    def alone(info: ParamInfo) -> ParamInfo:
        if info.span is None:
            return info
        return dataclasses.replace(info, span=(info.span[0] - before, info.span[1] - before))

    return dataclasses.replace(spec, infos=jax.tree.map(alone, spec.infos))
