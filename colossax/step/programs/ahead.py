"""A step of several programs dispatched without arrays: what it compiles, runs, sends and holds."""

import collections
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from colossax.compat import without_unused
from colossax.config import BoundPlan

PARAMETERS, OPTIMIZER, STATE, INPUT = "parameters", "optimizer", "state", "input"
GRADIENTS, KEPT, PENDING = "gradients", "kept for backward", "kept for weight gradients"
GATHERED, BETWEEN, OTHER = "gathered weights", "between chunks", "other"

_TERMS: Mapping[str, tuple[str, ...]] = {
    "cut": (INPUT,),
    "forward": (BETWEEN, KEPT),
    "backward": (BETWEEN, GRADIENTS),
    "input_gradient": (BETWEEN, PENDING),
    "weight_gradient": (GRADIENTS,),
    "zeros": (GRADIENTS,),
    "gathered": (GATHERED,),
    "reduced": (GRADIENTS,),
    "total": (GRADIENTS, OTHER),
}
"""What results of a program hold, by its name: of each item of a tuple, or of all."""


class _Memory:
    """Bytes of each device of one stage, until nobody has them."""

    def __init__(self, held: "collections.Counter[str]", term: str, count: int):
        self._held, self.term, self.bytes = held, term, count
        held[term] += count

    def free(self) -> None:
        """Give them back; a second time does nothing."""
        self._held[self.term] -= self.bytes
        self.bytes = 0

    __del__ = free


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Absent:
    """An array of a rehearsed step, which is not there.

    Attributes:
        shape: Whole.
        dtype: Of its items.
        sharding: Where it would lie.
        weak_type: As JAX has it.
        memory: What it would take, by stage; views of one array share it.
        rehearsal: Whose it is.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    weak_type: bool
    memory: Mapping[int, _Memory]
    rehearsal: "Rehearsal"

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """What a program is compiled for."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, sharding=self.sharding, weak_type=self.weak_type
        )

    def delete(self) -> None:
        """Give up its memory."""
        for one in self.memory.values():
            one.free()

    def on(self, there: BoundPlan, *, passed: bool = False) -> "Absent":
        """It on the devices of one stage: the same memory where it lies there, else sent.

        Args:
            there: The stage.
            passed: Whether a chunk leaves it for another, of each microbatch.
        """
        sharding = NamedSharding(there.mesh, self.sharding.spec)
        stage = self.rehearsal.stage_of(sharding)
        if stage in self.memory:
            return dataclasses.replace(self, sharding=sharding, memory={stage: self.memory[stage]})
        return self.rehearsal.sent(self, sharding, passed=passed)


def joined(bound: BoundPlan, parts: Sequence[Absent]) -> Absent:
    """What all stages have alike, as an array of the whole mesh: the same memory."""
    memory = {stage: one for part in parts for stage, one in part.memory.items()}
    sharding = NamedSharding(bound.mesh, parts[0].sharding.spec)
    return dataclasses.replace(parts[0], sharding=sharding, memory=memory)


@dataclasses.dataclass(kw_only=True, eq=False)
class Ran:
    """A program of one stage.

    Attributes:
        stage: Whose.
        name: Of what it does: `forward`, `backward`, `conclude`, ...
        chunk: Of the stage's chunks, where each has such a program, else 0.
        times: How often a step runs it.
        jaxpr: As traced, without what nothing needs.
        program: As compiled; stages that have it alike share it.
    """

    stage: int
    name: str
    chunk: int
    jaxpr: Any
    program: Any
    times: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """When most of a stage's memory is in use.

    Attributes:
        bytes: Of each device.
        held: By what they hold, what the program runs on among it.
        ran: The program that runs then, whose results and temporaries are the rest.
    """

    bytes: int
    held: Mapping[str, int]
    ran: Ran


Compile = Callable[[int, Any], Any]
"""`(stage, lowered) -> program`, with `stats` and `out_shardings`; see `colossax.aot.Program`."""


class Rehearsal:
    """A step's dispatch with arrays that are not there.

    Each program is compiled when it is first called, once for all stages that have it alike.

    Attributes:
        ran: Programs, in the order in which they are first called.
        sent_bytes: From one stage to another, of each of their devices.
        messages: How many arrays those are.
        passed_bytes: Of those, of what chunks leave for one another: of each microbatch.
        passed_messages: How many arrays those are.
        peaks: Of each stage.
        most: Of each stage, the most that it ever held by what it holds.
    """

    def __init__(self, bound: BoundPlan, compile: Compile):
        """Nothing has been called.

        Args:
            bound: Plan and all devices.
            compile: Called once for each program that differs.
        """
        grid = bound.mesh.devices
        stages = grid.reshape(grid.shape[0], -1)
        self.bound, self._compile = bound, compile
        self._stages = {device: at for at, row in enumerate(stages) for device in row}
        self._held: list[collections.Counter[str]] = [collections.Counter() for _ in stages]
        self._programs: dict[Any, Any] = {}
        self._jitted: collections.Counter[tuple[int, str]] = collections.Counter()
        self.ran: list[Ran] = []
        self.sent_bytes: collections.Counter[tuple[int, int]] = collections.Counter()
        self.messages: collections.Counter[tuple[int, int]] = collections.Counter()
        self.passed_bytes: collections.Counter[tuple[int, int]] = collections.Counter()
        self.passed_messages: collections.Counter[tuple[int, int]] = collections.Counter()
        self.peaks: list[Peak | None] = [None for _ in stages]
        self.most: list[dict[str, int]] = [{} for _ in stages]

    def array(self, x: Any, sharding: NamedSharding, term: str) -> Absent:
        """One that is not there, of this shape and dtype."""
        size = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        stages = sorted({self._stages[device] for device in sharding.device_set})
        memory = {stage: _Memory(self._held[stage], term, size) for stage in stages}
        for stage in stages:
            most = self.most[stage]
            most[term] = max(most.get(term, 0), self._held[stage][term])
        return Absent(
            shape=x.shape,
            dtype=x.dtype,
            sharding=sharding,
            weak_type=getattr(x, "weak_type", False),
            memory=memory,
            rehearsal=self,
        )

    def arrays(self, tree: Any, term: str) -> Any:
        """Of shapes with shardings."""
        return jax.tree.map(lambda x: self.array(x, x.sharding, term), tree)

    def held_bytes(self) -> list[int]:
        """Of each stage, by now."""
        return [sum(held.values()) for held in self._held]

    def stage_of(self, sharding: Any) -> int:
        """The stage on whose devices an array lies."""
        return self._stages[next(iter(sharding.device_set))]

    def sent(self, x: Absent, sharding: NamedSharding, *, passed: bool = False) -> Absent:
        """A copy on the devices of another stage; see `Absent.on`."""
        origin = next(iter(x.memory))
        term = BETWEEN if x.memory[origin].term == BETWEEN else OTHER
        copy = self.array(x, sharding, term)
        link = (origin, self.stage_of(sharding))
        self.sent_bytes[link] += copy.memory[link[1]].bytes
        self.messages[link] += 1
        if passed:
            self.passed_bytes[link] += copy.memory[link[1]].bytes
            self.passed_messages[link] += 1
        return copy

    def jitted(self, here: BoundPlan, fn: Callable, **options: Any) -> "_Program":
        """In place of `jax.jit`, for the devices of one stage."""
        stage = self._stages[next(here.mesh.devices.flat)]
        return _Program(self, stage, fn, options)

    def compiled(self, stage: int, lowered: Any) -> Any:
        """A program for a stage; one that another has alike is that one."""
        devices = [device for device, at in self._stages.items() if at == stage]
        hosts = tuple(device.process_index - devices[0].process_index for device in devices)
        key = (lowered.as_text(), devices[0].device_kind, hosts)
        if key not in self._programs:
            self._programs[key] = self._compile(stage, lowered)
        return self._programs[key]

    def numbered(self, stage: int, name: str) -> int:
        """How many programs of this name a stage had before."""
        self._jitted[stage, name] += 1
        return self._jitted[stage, name] - 1

    def note(self, ran: Ran) -> None:
        """A program is about to run, with all that the stage holds by now."""
        ran.times += 1
        held, stats = self._held[ran.stage], ran.program.stats
        made = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
        before = self.peaks[ran.stage]
        total = sum(held.values()) + made
        if before is None or total > before.bytes:
            self.peaks[ran.stage] = Peak(bytes=total, held=dict(+held), ran=ran)


class _Program:
    """What `jax.jit` gives, for arrays that are not there."""

    def __init__(self, rehearsal: Rehearsal, stage: int, fn: Callable, options: Mapping[str, Any]):
        self._rehearsal, self._stage = rehearsal, stage
        self._name = getattr(fn, "__name__", "program")
        given = options.get("donate_argnums", ())
        self._donated = (given,) if isinstance(given, int) else tuple(given)
        self._jit = jax.jit(fn, **options)
        self._forms: dict[Any, _Form] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        form = self._form(args, (structure, tuple(map(_form_of, leaves))))
        self._rehearsal.note(form.ran)
        for at in self._donated:
            for x in jax.tree.leaves(args[at]):
                x.delete()
        return form.results(self._rehearsal)

    def _form(self, args: Any, key: Any) -> "_Form":
        if key not in self._forms:
            self._forms[key] = _Form(self._rehearsal, self._stage, self._name, self._jit, args)
        return self._forms[key]


class _Form:
    """A program for arguments of one form."""

    def __init__(self, rehearsal: Rehearsal, stage: int, name: str, jit: Any, args: Any):
        avals = jax.tree.map(lambda x: x.aval if isinstance(x, Absent) else x, args)
        traced = jit.trace(*avals)
        lowered = traced.lower()
        program = rehearsal.compiled(stage, lowered)
        self.ran = Ran(
            stage=stage,
            name=name,
            chunk=rehearsal.numbered(stage, name),
            jaxpr=without_unused(traced.jaxpr),
            program=program,
        )
        rehearsal.ran.append(self.ran)
        mesh = rehearsal.bound.stage(stage).mesh
        infos, self._structure = jax.tree_util.tree_flatten_with_path(lowered.out_info)
        terms = _TERMS.get(name, (OTHER,))
        specs = map(_spec, jax.tree.leaves(program.out_shardings))
        self._results = [
            (info, NamedSharding(mesh, spec), _term(terms, path))
            for (path, info), spec in zip(infos, specs, strict=True)
        ]

    def results(self, rehearsal: Rehearsal) -> Any:
        found = [rehearsal.array(*result) for result in self._results]
        return jax.tree.unflatten(self._structure, found)


def _form_of(x: Any) -> Any:
    return x.shape, x.dtype, short(x.sharding.spec) if isinstance(x, Absent) else None


def short(spec: PartitionSpec) -> PartitionSpec:
    """As the compiler writes it: nothing behind the last dim that is split."""
    split = [at for at, entry in enumerate(spec) if entry is not None]
    return PartitionSpec(*spec[: split[-1] + 1 if split else 0])


def _term(terms: Sequence[str], path: Any) -> str:
    at = path[0].idx if len(terms) > 1 else 0
    return terms[at]


def _spec(sharding: Any) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


_REHEARSAL: contextvars.ContextVar[Rehearsal | None] = contextvars.ContextVar(
    "rehearsal", default=None
)


@contextlib.contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """What is jitted inside is the rehearsal's."""
    token = _REHEARSAL.set(rehearsal)
    try:
        yield
    finally:
        _REHEARSAL.reset(token)


def rehearses() -> bool:
    """Whether one goes on."""
    return _REHEARSAL.get() is not None


def jitted(here: BoundPlan, fn: Callable, **options: Any) -> Callable:
    """`jax.jit`, or the rehearsal's where one goes on; `here` is the plan on a stage's devices."""
    rehearsal = _REHEARSAL.get()
    return jax.jit(fn, **options) if rehearsal is None else rehearsal.jitted(here, fn, **options)
