"""The truth about a serving plan: its engine's steps compiled for the target."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from colossax.aot import (
    Program,
    Target,
    collectives,
    compile_program,
    target_devices,
    totals,
)
from colossax.config import BoundPlan, MeshAxis, Plan
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.inference.engine.sizing import PAGE_TOKENS, cache_bytes, layout_bytes
from colossax.inference.engine.staged import StagedSteps
from colossax.inference.plan import (
    param_shapes,
    parameters_alone,
    unrolled,
    with_stage_programs,
)
from colossax.nn import ModelSpec, describe
from colossax.planner.counting.traffic import Link, link_of
from colossax.planner.deciding.trial import choosing_for
from colossax.planner.serving.search import ServingCandidate
from colossax.planner.serving.served import ServedProfile
from colossax.sharding import use, validate
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledServing:
    """What the programs of an engine say; bytes are of the fullest device.

    Attributes:
        weights: Parameters.
        cache: Pages and what is kept of seats as a whole, of all engines that share the device.
        total: With all else, while the larger step runs.
        links: Collectives of a step that gives each seat a token; None where a loop of them ends
            when its numbers say so, and how often they run cannot be told.
    """

    weights: int
    cache: int
    total: int
    links: tuple[Link, ...] | None

    @property
    def waited(self) -> float | None:
        """Seconds of the collectives; None where they cannot be told."""
        return None if self.links is None else sum((one.seconds for one in self.links), 0.0)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        rest = self.total - self.weights - self.cache
        terms = {"weights": self.weights, "cache": self.cache, "step": rest}
        return {"total": self.total, "terms": terms}


def compiled_serving(
    profile: ServedProfile, one: ServingCandidate, target: Target
) -> CompiledServing:
    """Compile an engine's two steps for a target, as it would run them.

    Args:
        profile: The model.
        one: Plan and seats.
        target: Of one node.

    Raises:
        PlanError: The library refuses the plan for this model.
        InputError: The compiler plugin is missing, or the model cannot be served so.

    Cost: two compilations of all layers one by one, with stages of each of those; nothing is
    allocated. Replicas are alike, so one of them is compiled.
    """
    devices = target_devices(target)
    with choosing_for(target):
        bound, spec = _described(profile, one.plan, devices)
        params = param_shapes(bound, spec)
        sizes = sizes_of(profile, one)
        if bound.mesh.shape[MeshAxis.STAGE] > 1:
            return _of_stages(StagedSteps(spec, bound, sizes), params, one, target)
        program = EngineProgram(spec, bound, sizes)
        mixed, decode = (
            compile_program(program.lowered(kind, params), target=target)
            for kind in ("mixed", "decode")
        )
    return CompiledServing(
        weights=_bytes(jax.tree.leaves(params)),
        cache=cache_bytes(program),
        total=max(mixed.device_bytes, decode.device_bytes),
        links=_links([(decode, program.bound)], target),
    )


def sizes_of(profile: ServedProfile, one: ServingCandidate) -> Sizes:
    """Of each engine of a plan, with pages for seats that are as long as they may be."""
    engines = min(one.plan.mesh.get(MeshAxis.STAGE, 1), one.seats)
    seats = -(-one.seats // engines)
    return Sizes(
        seats=seats,
        pages=seats * profile.pages_a_seat,
        page_tokens=PAGE_TOKENS,
        slots=profile.context,
        mixed=max(profile.served.mixed, seats),
        decode=seats,
        cache=profile.served.cache,
    )


def _described(
    profile: ServedProfile, plan: Plan, devices: list[Any]
) -> tuple[BoundPlan, ModelSpec]:
    """The first replica's devices, and the model as it is loaded there."""
    make, plan = profile.served.make_model, parameters_alone(plan)
    bound = plan.bind(devices)
    with use(bound):
        spec = describe(make)
    if profile.served.unroll:
        plan = with_stage_programs(unrolled(plan, spec), bound, profile.config.layers)
        bound = plan.bind(devices)
        with use(bound):
            spec = describe(make)
    validate(bound, spec.infos)
    if bound.mesh.shape[MeshAxis.DATA] > 1:
        bound = bound.part(MeshAxis.DATA, 0)
    return bound, spec


def _of_stages(
    program: StagedSteps, params: Params, one: ServingCandidate, target: Target
) -> CompiledServing:
    """Of the fullest stage; all engines have a cache there, and one of them runs a step."""
    engines = min(len(program.stages), one.seats)
    steps = {
        kind: [compile_program(each, target=target) for each in program.lowered(kind, params)]
        for kind in ("mixed", "decode")
    }
    found = []
    for at, stage in enumerate(program.stages):
        held = _bytes(jax.tree.leaves(program.arguments("decode", params)[at][1]))
        total = max(step[at].device_bytes for step in steps.values()) + (engines - 1) * held
        cache = engines * layout_bytes(stage.cache)
        weights = _bytes(program.arguments("decode", params)[at][0])
        found.append((total, cache, weights))
    total, cache, weights = max(found)
    decode = zip(steps["decode"], (stage.bound for stage in program.stages), strict=True)
    return CompiledServing(weights=weights, cache=cache, total=total, links=_links(decode, target))


def _links(
    programs: Iterable[tuple[Program, BoundPlan]], target: Target
) -> tuple[Link, ...] | None:
    found: list[Link] = []
    for program, bound in programs:
        try:
            sums = totals(collectives(program.hlo, bound.mesh))
        except ValueError:  # loops of sampling end by the numbers in them
            return None
        found += [link_of(one, target, bound.mesh) for one in sums]
    return tuple(found)


def _bytes(leaves: Iterable[Any]) -> int:
    """Of arrays on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
