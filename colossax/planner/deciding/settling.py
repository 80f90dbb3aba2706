"""What a plan leaves to `auto`, decided: all of it here, in one order."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax

from colossax.aot import Target
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.nn import GivenDims, MakeModels, describe, named
from colossax.offload import Agree, Rates, load_rates, resolved_segments
from colossax.optim import Optimizer
from colossax.planner.deciding.chunk_rates import with_chunk_rates
from colossax.planner.deciding.cpu_share import with_cpu_share
from colossax.planner.deciding.fitting import Fitted, fit_offload
from colossax.planner.deciding.mlp_share import with_mlp_share
from colossax.planner.deciding.pipelined import with_pipelined
from colossax.planner.deciding.stage_cuts import with_stage_cuts
from colossax.sharding import use
from colossax.step.loss import Loss
from colossax.step.microbatches import batch_dims, check_microbatches
from colossax.step.options import StepOptions
from colossax.step.stages import check_stages
from colossax.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What decisions about a plan rest on: the step's own parts, and where it is to run.

    Attributes:
        make_model: See `boost`.
        optimizer: See `boost`.
        loss: See `boost`.
        options: Of the step; `shapes` are wanted by what depends on the tokens of a batch.
        devices: Default all.
        target: GPUs that are not there, whose devices those are.
        dims: Names of the parameters' dims by pattern; see `named`.
        agree: With several processes, `Group.from_first`.
        rates: What was measured of a kind of device; None where nothing was.
        recipe: Under whose name layers were measured; None: none were.
    """

    make_model: MakeModels
    optimizer: Optimizer
    loss: Loss
    options: StepOptions = StepOptions()
    devices: Sequence[jax.Device] | None = None
    target: Target | None = None
    dims: GivenDims | None = None
    agree: Agree = lambda make: make()
    rates: Callable[[str], Rates | None] = load_rates
    recipe: str | None = None

    @property
    def device(self) -> jax.Device:
        """One of them, which are all of a kind."""
        return (jax.devices() if self.devices is None else self.devices)[0]

    def step(self, plan: Plan, reasons: Mapping[str, str] = MappingProxyType({})) -> Step:
        """The step of a plan; nothing is decided and nothing compiled.

        Args:
            plan: Settled, but for a segment's `mlp_share`, as long as no layer is traced.
            reasons: Of a settled plan.

        Raises:
            PlanError: Model, batch or devices do not fit the plan.
            InputError: The names that are given do not fit the model.
        """
        bound = plan.bind(self.devices)
        with use(bound):
            spec = named(describe(self.make_model), bound, self.dims)
        step = Step(spec, bound, self.optimizer, self.loss, self.options, reasons)
        if self.options.shapes is not None:
            shapes = jax.eval_shape(lambda batch: batch, dict(self.options.shapes))
            check_microbatches(bound, shapes, batch_dims(shapes, self.options.batch_dims))
        return step

    def on(self, devices: Sequence[jax.Device]) -> "Facts":
        """The same on other devices."""
        return dataclasses.replace(self, devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """A plan that leaves nothing open.

    Attributes:
        plan: With numbers in place of every `auto`.
        reasons: Of each setting that was decided, in the order in which it was: a line for people.
        fitted: How `offload.auto` was decided, where it was.
    """

    plan: Plan
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fitted: Fitted | None = None


def settle(plan: Plan, facts: Facts) -> Settled:
    """Decide what a plan leaves to `auto`, in the order of `ORDER`.

    Each decision sees those before it. The search for what stays on the device comes first; each
    of the plans that it compiles is settled itself, so that what was compiled is what will run.
    A plan that leaves nothing open comes back as it is.

    Raises:
        PlanError: A budget does not do, or is given for nothing; the tokens of a batch are wanted
            and not known; model, batch or devices do not fit the plan.
        InputError: The file of rates is damaged.

    Cost: with `offload.auto` that of `fit_offload`; with a segment's `mlp_share`, a forward pass is
    traced. Nothing is allocated.
    """
    plan.check_budgets()
    reasons: dict[str, str] = {}
    fitted = None
    if plan.offload.auto:
        fitted = _fitted(plan, facts)
        plan, reasons["offload.auto"] = fitted.plan, fitted.line
    for setting, decide in _RULES.items():
        plan, line = decide(plan, facts)
        if line is not None:
            reasons[setting] = line
    return Settled(plan=plan, reasons=reasons, fitted=fitted)


def check_settled(plan: Plan) -> None:
    """Refuse a plan that leaves something open.

    Raises:
        PlanError: Naming what.
    """
    offload = plan.offload
    left = {
        "offload.auto": offload.auto,
        "pipeline.cuts": plan.pipeline.cuts == "auto",
        "offload.cpu_update": offload.cpu_update == "auto",
        "offload.pipelined": offload.pipelined == "auto",
        "experts.chunks": plan.experts.chunks == "auto" and plan.experts.rates is None,
        "segments.mlp_share": any(segment.mlp_share == "auto" for segment in plan.segments),
    }
    for setting in ORDER:
        if left[setting]:
            raise PlanError(
                f"plan.{setting}: is yet to be decided ('auto'), and a step is built of a plan that"
                " leaves nothing open; settle it with colossax.planner.settle, or use boost"
            )


def _fitted(plan: Plan, facts: Facts) -> Fitted:
    check_stages(plan.bind(facts.devices))
    if facts.options.shapes is None:
        raise PlanError(
            "plan.offload 'auto': the shares are not known yet, and depend on the tokens of a"
            " batch; give a batch or its shapes, as in boost(..., shapes=batch), find them with"
            " colossax.fit_offload(...), or give parameters, optimizer and activations"
        )

    def make_step(candidate: Plan) -> Step:
        return facts.step(settle(candidate, facts).plan)

    return fit_offload(
        make_step, plan, facts.options.shapes, target=facts.target, agree=facts.agree
    )


def _stage_cuts(plan: Plan, facts: Facts) -> tuple[Plan, str | None]:
    def build(plan: Plan, devices: Sequence[jax.Device], options: StepOptions) -> Step:
        return dataclasses.replace(facts, devices=devices, options=options).step(plan)

    return with_stage_cuts(
        plan,
        jax.devices() if facts.devices is None else facts.devices,
        facts.options,
        build,
        recipe=facts.recipe,
        target=facts.target,
        agree=facts.agree,
    )


def _cpu_update(plan: Plan, facts: Facts) -> tuple[Plan, str | None]:
    return with_cpu_share(
        plan,
        facts.optimizer,
        [facts.device],
        reachable=lambda: _reached_by_cpu(plan, facts),
        rates=facts.rates,
    )


def _reached_by_cpu(plan: Plan, facts: Facts) -> bool:
    """Whether any layer has parameters and optimizer state in host memory."""
    offload = dataclasses.replace(plan.offload, cpu_update=1.0)
    with use(plan.bind(facts.devices)):
        infos = jax.tree.leaves(describe(facts.make_model).infos)
    depths = {info.total_layers for info in infos if info.total_layers is not None}
    runs = [run for n in depths for run in resolved_segments(plan.replace(offload=offload), n)]
    return any(run.placement.updated_by_cpu for run in runs)


def _pipelined(plan: Plan, facts: Facts) -> tuple[Plan, str | None]:
    device = facts.device
    return with_pipelined(plan, device.platform, device.device_kind, rates=facts.rates)


def _chunks(plan: Plan, facts: Facts) -> tuple[Plan, str | None]:
    devices = jax.devices() if facts.devices is None else facts.devices
    return with_chunk_rates(plan, facts.target, list(devices))


def _mlp_share(plan: Plan, facts: Facts) -> tuple[Plan, str | None]:
    if all(segment.mlp_share != "auto" for segment in plan.segments):
        return plan, None
    step = facts.step(plan)
    alone = facts.on([step.bound.mesh.devices.flat[0]])
    return with_mlp_share(step, alone.step, rates=facts.rates)


_RULES: dict[str, Callable[[Plan, Facts], tuple[Plan, str | None]]] = {
    "pipeline.cuts": _stage_cuts,
    "offload.cpu_update": _cpu_update,
    "offload.pipelined": _pipelined,
    "experts.chunks": _chunks,
    "segments.mlp_share": _mlp_share,
}
"""What is decided once `offload.auto` is: to a plan, and a line where there was a choice."""

ORDER: tuple[str, ...] = ("offload.auto", *_RULES)
"""Settings that may be `auto`, as they are decided."""
