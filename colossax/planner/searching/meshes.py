"""Every mesh that a model, its batch and the nodes of a target allow."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from colossax.aot import Target
from colossax.config import (
    BatchConfig,
    ExpertsConfig,
    FrozenDict,
    MeshAxis,
    PipelineConfig,
    Plan,
    preset,
)
from colossax.config.rules import Rules
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.forms import Form, Forms

AXES = (
    MeshAxis.STAGE,
    MeshAxis.DATA,
    MeshAxis.FSDP,
    MeshAxis.EXPERT,
    MeshAxis.RING,
    MeshAxis.ULYSSES,
    MeshAxis.TENSOR,
)
"""Axes that are searched, outer first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds the sizes of axes.

    Attributes:
        rows: Of a global batch.
        tokens: What divides a row and all that layers make of it divides evenly.
        heads: Of attention; 0 where parameters have no dim of that name.
        travels: Whether keys and values are known that would travel among parts of a sequence.
        experts: Of a mixture; 0 without one.
        layers: That stages may share; 0 where they cannot.
    """

    rows: int
    tokens: int
    heads: int
    travels: bool
    experts: int
    layers: int


def limits_of(profile: ModelProfile) -> Limits:
    """Read off the traced layers."""
    heads = [info.shape[info.dims.index("heads")] for info in profile.infos if "heads" in info.dims]
    named = [
        [array.shape for array in kind.traced.kept if array.name == "qkv"] for kind in profile.kinds
    ]
    experts = [
        info.shape[info.dims.index("experts")] for info in profile.infos if "experts" in info.dims
    ]
    alike = profile.kinds if profile.staged else ()
    return Limits(
        rows=profile.rows,
        tokens=functools.reduce(math.gcd, (kind.tokens for kind in profile.kinds), profile.tokens),
        heads=functools.reduce(math.gcd, heads, 0),
        travels=bool(named) and all([len(shape) for shape in each] == [4] * 3 for each in named),
        experts=functools.reduce(math.gcd, experts, 0),
        layers=sum(kind.calls for kind in alike),
    )


def meshes(target: Target, limits: Limits, pinned: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes by axis whose product is the target's devices; those that are pinned are as given.

    `tensor` and `ulysses` wait for every message, so they stay within a node.
    """
    for sizes in factors(target.size, len(AXES)):
        mesh = {axis.value: size for axis, size in zip(AXES, sizes, strict=True)}
        if all(mesh[axis] == size for axis, size in pinned.items()) and _allowed(
            mesh, target, limits, pinned
        ):
            yield mesh


def _allowed(
    mesh: Mapping[str, int], target: Target, limits: Limits, pinned: Mapping[str, int]
) -> bool:
    tensor, ulysses = mesh[MeshAxis.TENSOR], mesh[MeshAxis.ULYSSES]
    ring, expert = mesh[MeshAxis.RING], mesh[MeshAxis.EXPERT]
    inner = tensor * ulysses
    if target.gpus % inner and not {MeshAxis.TENSOR, MeshAxis.ULYSSES} & pinned.keys():
        return False
    if limits.rows % (mesh[MeshAxis.DATA] * mesh[MeshAxis.FSDP] * expert):
        return False
    stages = mesh[MeshAxis.STAGE]
    if stages > 1 and (not limits.layers or limits.layers % stages):
        return False
    if expert > 1 and (not limits.experts or limits.experts % expert):
        return False
    if ring * ulysses > 1 and not limits.travels:
        return False
    if tensor > 1 and not limits.heads:
        return False
    if inner > 1 and limits.heads % inner:
        return False
    # Rings are balanced by two chunks of a row on each device.
    return not limits.tokens % (ulysses * ring * (2 if ring > 1 else 1))


@functools.cache
def factors(number: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write a number as a product of so many, in order."""
    if count == 1:
        return ((number,),)
    return tuple(
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factors(number // first, count - 1)
    )


CHUNKS = ((1, 2, 4), (1, 3, 5))
"""Of a stage with an even and with an odd number of layers, that are tried: more have shorter
bubbles, more that waits and more messages."""


class Way(NamedTuple):
    """One way to have a mesh.

    Attributes:
        words: For people.
        rules: A preset's.
        stored: Whether those split parameters at rest.
        chunks: Of each stage.
        whole: Whether layers' weights are gathered once a step.
        once: Whether gradients are summed once a step.
        staged: Whether stages share the layers.
        plan: Makes the plan.
        form: In which tokens meet their experts; None without experts, or where none is tried.
    """

    words: str
    rules: Rules
    stored: bool
    chunks: int
    whole: bool
    once: bool
    staged: bool
    plan: Callable[[], Plan]
    form: Form | None = None

    @property
    def smallest(self) -> bool:
        """Whether no other way to have the mesh needs less memory."""
        return self.stored and self.chunks == 1 and not self.whole and not self.once

    @property
    def hosts(self) -> bool:
        """Whether layers' arrays may live in host memory."""
        return self.stored or self.staged


def ruled(
    plan: Plan,
    mesh: Mapping[str, int],
    limits: Limits,
    pinned: Mapping[str, int] = FrozenDict(),
    forms: Forms | None = None,
) -> Iterator[Way]:
    """Each way to have a mesh.

    With `forms` each with each form in which tokens may meet their experts there, else as the plan
    has it.

    Rules that split optimizer state alone do so over `data` as over `fsdp`, so that one of the two
    stands for both, unless either is given.

    Where `tensor` divides the tokens, the sequence is split over it between blocks: the same bytes
    are sent, and less is kept. Under stages weights may be gathered, and gradients summed, for each
    microbatch or once a step.
    """
    ways = _ruled(plan, mesh, limits, pinned)
    if forms is None or not limits.experts:
        yield from ways
        return
    tensor, folded = mesh[MeshAxis.TENSOR] > 1, not {MeshAxis.EXPERT, MeshAxis.FSDP} & pinned.keys()
    splits = tensor and _by_sequence(mesh, limits)
    found = forms(mesh, splits=splits, folded=folded)
    for way in ways:
        for one in found:
            if one.gathers and (way.whole or not way.stored):
                continue  # every device would have all experts, all of a step
            if not one.words:
                yield way._replace(form=one)
                continue
            words = f"{way.words} {one.words}"
            make = functools.partial(_with_experts, way.plan, one.experts)
            yield way._replace(words=words, plan=make, form=one)


def _with_experts(plan: Callable[[], Plan], experts: ExpertsConfig) -> Plan:
    return plan().replace(experts=experts)


def _by_sequence(mesh: Mapping[str, int], limits: Limits) -> bool:
    """Whether `tensor` may split the sequence between blocks."""
    along = mesh[MeshAxis.TENSOR] * mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES]
    return limits.tokens % along == 0


def _ruled(
    plan: Plan, mesh: Mapping[str, int], limits: Limits, pinned: Mapping[str, int]
) -> Iterator[Way]:
    tensor = "+megatron" if mesh[MeshAxis.TENSOR] > 1 else ""
    if tensor and _by_sequence(mesh, limits):
        tensor = "+megatron_sp"
    sizes = {axis: n for axis, n in mesh.items() if n > 1} or {"data": 1}
    stages, split = mesh[MeshAxis.STAGE], mesh[MeshAxis.FSDP] > 1
    given = {MeshAxis.DATA, MeshAxis.FSDP} & pinned.keys()
    states = mesh[MeshAxis.DATA] * mesh[MeshAxis.FSDP] > 1 if given else split
    states = states and (bool(given) or mesh[MeshAxis.DATA] == 1)
    if stages == 1:
        for name in ("zero3", "zero2") if states else ("zero3",):
            rules = rules_of(name + tensor)
            make = functools.partial(plan.replace, mesh=sizes, rules=rules)
            yield Way(name + tensor, rules, name == "zero3", 1, False, False, False, make)
        return
    ways = [("zero3", "microbatch", False)]
    # Gathered or summed once a step, experts would be whole on every device of their group.
    if mesh[MeshAxis.EXPERT] == 1:
        ways += [("zero3", "step", False)] * split + [("zero1", "microbatch", True)] * states
    layers = limits.layers // stages
    for chunks in CHUNKS[layers % 2]:
        if layers % chunks:
            continue
        for name, gather, once in ways:
            rules = rules_of(name + tensor)
            words = [name + tensor]
            words += [f"{chunks} chunks"] * (chunks > 1) + ["gathered once"] * (gather == "step")
            make = functools.partial(_staged, plan, sizes, rules, chunks, gather, once=once)
            whole, zero3 = gather == "step", name == "zero3"
            yield Way(" ".join(words), rules, zero3, chunks, whole, once, True, make)


def _staged(
    plan: Plan, mesh: Mapping[str, int], rules: Rules, chunks: int, gather: str, *, once: bool
) -> Plan:
    pipeline = PipelineConfig(chunks=chunks, gather=gather)
    batch = BatchConfig(reduce_once=once)
    return plan.replace(mesh=mesh, rules=rules, pipeline=pipeline, batch=batch)


@functools.cache
def rules_of(name: str) -> Rules:
    """Of a preset."""
    return preset(name).rules
