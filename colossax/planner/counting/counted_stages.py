"""A step with programs of stages, compiled for GPUs that are not there and counted."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from colossax.aot import (
    Collective,
    MemoryReport,
    Program,
    Target,
    checkpoint_stacks,
    collectives,
    compile_program,
    memory_report,
    parse_module,
    totals,
)
from colossax.aot.terms import OPTIMIZER, PARAMETERS
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.pipeline import Costs, Kind, Table, simulate
from colossax.planner.counting.compiled import settle_task_for_target
from colossax.planner.counting.flops import matmul_seconds, peak_flops
from colossax.planner.counting.islands import (
    Crossings,
    device_places,
    island_devices,
    mesh_crossings,
    proved,
    stage_devices,
    stage_link,
    stage_target,
)
from colossax.planner.counting.stage_programs import Edge, ProgramsCost, StageFacts
from colossax.planner.counting.traced_flops import TracedFlops, traced_flops
from colossax.planner.counting.traffic import ASSUMED_EFFICIENCY, Link, link_of
from colossax.planner.deciding.trial import choosing_for
from colossax.planner.task_step import task_step
from colossax.sharding import compiler_options
from colossax.sharding.experts.exchange import PASSES, assumed_turns
from colossax.step.programs import Ran, Rehearsed, RehearsedStage, rehearsed
from colossax.step.step import Step
from colossax.tasks import Task

_KINDS = {
    "forward": (Kind.FORWARD,),
    "backward": (Kind.INPUT, Kind.WEIGHT),
    "input_gradient": (Kind.INPUT,),
    "weight_gradient": (Kind.WEIGHT,),
}
"""What a program of this name is in a table; a whole backward pass is both, half and half."""

_ARGUMENT = "argument"


def counted_stages(task: Task, plan: Plan, target: Target) -> tuple[Step, ProgramsCost]:
    """A task's step whose stages have programs of their own, and what those need on a target.

    What the plan leaves open is settled for the target.

    Raises:
        InputError: See `settle_task_for_target`.
        PlanError: The plan puts anything into host memory.
    """
    check_counted_stages(plan, target)
    settled = settle_task_for_target(task, plan, target)
    with choosing_for(target):
        step = task_step(task, settled, island_devices(settled.plan, target))
        programs = compiled_programs(step, task, target)
    return step, programs_cost(step, task, programs, target)


def check_counted_stages(plan: Plan, target: Target) -> None:
    """Refuse a plan whose stages have programs of their own and anything in host memory.

    Args:
        plan: Which.
        target: Of several islands stages cannot do without programs of their own.

    Raises:
        PlanError: It is such a plan.
    """
    if plan.offload.wanted or any(not each.placement.all_on_device for each in plan.segments):
        instead = "" if target.mixed else ", or leave plan.pipeline.cuts out"
        raise PlanError(
            "plan.offload: what programs of stages have in host memory is not counted ahead in this"
            f" version; inspect with --plan.offload none{instead}"
        )


def compiled_programs(step: Step, task: Task, target: Target) -> Rehearsed:
    """The programs of all stages, compiled for the devices that the step was built for.

    Those may be of several kinds, if each stage has devices of one.

    Args:
        step: Whose stages have programs of their own.
        task: Its batch's shapes.
        target: Those devices.

    Cost: compiles each program once that differs from the others; no more for more microbatches.
    """
    options = compiler_options(step.bound)

    def compile(_: int, lowered: Any) -> Program:
        return compile_program(lowered, options=options, target=target)

    return rehearsed(step, step.abstract_batch(task.shapes), compile)


def programs_cost(step: Step, task: Task, found: Rehearsed, target: Target) -> ProgramsCost:
    """Count what the programs of all stages need, do and send.

    An operation takes its FLOPs at `ASSUMED_EFFICIENCY` of its GPUs' peak (of what is multiplied in
    float8, of that; else of the compute dtype), and the seconds of collectives beside which nothing
    is computed. FLOPs that tracing does not see (kernels of attention) are added in proportion to
    those that it sees, where the task says how many there are.

    Args:
        step: Its plan.
        task: Its FLOPs.
        found: Of `compiled_programs`.
        target: Of one island or several.
    """
    counting = _Counting(step, task, found, target)
    stages = tuple(map(counting.stage, found.stages))
    edges = tuple(_edge(step, found, *link, target) for link in sorted(found.sent_bytes))
    seconds = {
        kind: tuple(one.microbatch_s.get(kind, 0.0) for one in stages)
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    }
    costs = Costs(
        forward=seconds[Kind.FORWARD],
        input=seconds[Kind.INPUT],
        weight=seconds[Kind.WEIGHT],
        transfer=transfer_s(found.table, edges) if counting.timed else 0.0,
    )
    report = simulate(found.table, costs, "free")
    rest_s = max(one.rest_s for one in stages)
    rest_s += max((edge.once_s for edge in edges), default=0.0)
    return ProgramsCost(
        schedule=step.bound.plan.pipeline.resolved,
        table=found.table,
        costs=costs,
        report=report,
        stages=stages,
        edges=edges,
        step_s=report.time + rest_s if counting.timed else None,
        programs=tuple({id(ran.program): ran.program for ran in found.ran}.values()),
        flops=counting.all_flops,
        crossings=_crossings(step, found, target) if target.mixed else None,
        assumed_loops=counting.assumed_loops,
    )


def transfer_s(table: Table, edges: Iterable[Edge]) -> float:
    """Seconds of what a chunk leaves for another, on the slowest edge.

    An edge carries as many of those as pairs of neighbouring chunks have it, of each microbatch;
    where none do, what layers count for the loss of each.
    """
    messages = simulate(table, Costs(boundary_bytes=1), "free").link_bytes
    each = (
        edge.passed_s / messages.get((edge.origin, edge.end), table.microbatches) for edge in edges
    )
    return max(each, default=0.0)


def _crossings(step: Step, found: Rehearsed, target: Target) -> Crossings:
    """Which axis crosses what, read in the programs of all stages."""
    programs = [
        (f"stage {ran.stage}, {ran.name}", ran.program.hlo, step.bound.stage(ran.stage).mesh)
        for ran in found.ran
    ]
    crossings = mesh_crossings(step.bound.plan, target)
    return proved(crossings, target, programs, device_places(step.bound, target))


class _Counting:
    """FLOPs, seconds and collectives of programs."""

    def __init__(self, step: Step, task: Task, found: Rehearsed, target: Target):
        count = found.table.stages
        targets = [stage_target(step.bound.plan, target, stage) for stage in range(count)]
        self._step, self._target, self._targets, self._found = step, target, targets, found
        self._flops = {id(ran): traced_flops(ran.jaxpr) for ran in found.ran}
        precision = step.bound.plan.precision
        dtypes = (precision.compute, precision.multiplies_in)
        peaks = [[peak_flops(one.gpu.name, dtype) for dtype in dtypes] for one in targets]
        self.timed = not any(None in pair for pair in peaks)
        share = ASSUMED_EFFICIENCY * (step.bound.mesh.size // len(targets))
        self._rates = [[share * (peak or 1.0) for peak in pair] for pair in peaks]
        self._scale = self._unseen(task)
        self._collectives: dict[int, tuple[Collective, ...]] = {}
        self.assumed_loops = 0

    @property
    def all_flops(self) -> TracedFlops:
        """Of a step on all stages."""
        left_out = {name for one in self._flops.values() for name in one.left_out}
        flops = sum(map(self._flops_of, self._found.ran))
        float8 = sum(ran.times * self._flops[id(ran)].float8_flops for ran in self._found.ran)
        return TracedFlops(flops=flops, left_out=tuple(sorted(left_out)), float8_flops=float8)

    def stage(self, one: RehearsedStage) -> StageFacts:
        """All of a stage."""
        seconds: dict[Kind, float] = {}
        for ran in one.ran:
            for kind in _KINDS.get(ran.name, ()):
                share = self._seconds(ran) / len(_KINDS[ran.name])
                seconds[kind] = seconds.get(kind, 0.0) + share
        once = [ran.times * self._seconds(ran) for ran in one.ran if ran.name not in _KINDS]
        return StageFacts(
            number=one.number,
            target=self._targets[one.number],
            layers=one.layers,
            argument_bytes=one.argument_bytes,
            memory=_memory(one),
            most=one.most,
            temporaries=_temporaries(one.ran),
            flops=sum(map(self._flops_of, one.ran)),
            busiest=one.peak.ran.name,
            links=self._links(one.number, one.ran),
            microbatch_s=seconds,
            rest_s=sum(once) if self.timed else 0.0,
        )

    def _unseen(self, task: Task) -> float:
        """By how much more is computed than tracing sees."""
        forward = [ran for ran in self._found.ran if ran.name == "forward"]
        seen = sum(map(self._flops_of, forward))
        hidden = any(self._flops[id(ran)].left_out for ran in forward)
        return max(1.0, task.flops / 3 / seen) if hidden and seen else 1.0

    def _flops_of(self, ran: Ran) -> int:
        return ran.times * self._flops[id(ran)].flops

    def _seconds(self, ran: Ran) -> float:
        """Of one run; FLOPs over nothing's peak are FLOPs."""
        seen = self._flops[id(ran)]
        rates = self._rates[ran.stage]
        computing = matmul_seconds(self._scale * seen.flops, seen.float8_flops, rates)
        if not self.timed:
            return computing
        links = self._links(ran.stage, [dataclasses.replace(ran, times=1)])
        return computing + sum(link.exposed_s for link in links)

    def _links(self, stage: int, programs: Sequence[Ran]) -> tuple[Link, ...]:
        every = [one for ran in programs for one in self._scaled(ran)]
        mesh = self._step.bound.stage(stage).mesh
        first = stage_devices(self._step.bound.plan, self._target, stage)[0]
        return tuple(link_of(sums, self._target, mesh, first=first) for sums in totals(every))

    def _scaled(self, ran: Ran) -> Iterator[Collective]:
        """Collectives of all runs of a program."""
        if id(ran.program) not in self._collectives:
            mesh = self._step.bound.stage(ran.stage).mesh
            turns = assumed_turns(self._step.bound.plan.experts.chunks)
            module, found = parse_module(ran.program.hlo).assuming(PASSES, turns)
            self.assumed_loops += found
            self._collectives[id(ran.program)] = collectives(module, mesh)
        for one in self._collectives[id(ran.program)]:
            yield dataclasses.replace(
                one,
                count=one.count * ran.times,
                bytes=one.bytes * ran.times,
                ring_bytes=one.ring_bytes * ran.times,
            )


def _memory(one: RehearsedStage) -> MemoryReport:
    """Of a stage when most of its memory is in use."""
    peak, program = one.peak, one.peak.ran.program
    found = memory_report(program, term_of=_term, names=checkpoint_stacks(peak.ran.jaxpr))
    made = {
        term: count
        for term, count in found.terms.items()
        if term not in (PARAMETERS, OPTIMIZER, _ARGUMENT)
    }
    terms = dict(peak.held)
    for term, count in made.items():
        terms[term] = terms.get(term, 0) + count
    assert sum(terms.values()) == peak.bytes
    return MemoryReport(
        total_bytes=peak.bytes,
        argument_bytes=one.argument_bytes,
        temp_bytes=peak.bytes - one.argument_bytes,
        host_bytes=found.host_bytes,
        terms=terms,
        largest=found.largest,
    )


def _term(path: str) -> str:
    """Of an argument of a stage's program."""
    if path.startswith(("params", "own['params']")):
        return PARAMETERS
    return OPTIMIZER if path.startswith("own['opt_state']") else _ARGUMENT


def _temporaries(programs: Sequence[Ran]) -> Mapping[str, int]:
    """By program; of several chunks the most."""
    found: dict[str, int] = {}
    for ran in programs:
        found[ran.name] = max(found.get(ran.name, 0), ran.program.stats.temp_size_in_bytes)
    return found


def _edge(step: Step, found: Rehearsed, origin: int, end: int, target: Target) -> Edge:
    """What goes from a stage to another, over the slowest link that it crosses."""
    sent, messages = found.sent_bytes[origin, end], found.messages[origin, end]
    passed = found.passed_bytes.get((origin, end), 0)
    passed_messages = found.passed_messages.get((origin, end), 0)
    link = stage_link(step.bound.plan, target, origin, end)
    return Edge(
        origin=origin,
        end=end,
        bytes=sent,
        messages=messages,
        link=link.name,
        seconds=messages * link.latency_s + sent / link.bytes_per_s,
        passed_s=passed_messages * link.latency_s + passed / link.bytes_per_s,
    )
