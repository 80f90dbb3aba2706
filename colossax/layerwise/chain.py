"""A loss as a chain of runs of layers, of one stack or of several, cut behind any of them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from colossax.compat import Equations
from colossax.errors import PlanError
from colossax.layerwise.cut import RUN, marked
from colossax.layerwise.runs import LayerRun, Scanned


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """Consecutive runs of a chain, with all of the loss that belongs to them.

    Attributes:
        apply: `(args, values, sums) -> (values, sums)`: the loss's arguments, what the links before
            hand on, and for the last link sums of all runs before it, to what it hands on and the
            sums of its runs, `[layers, ...]` each. The last one gives the loss's result, and none.
        reads: Leaves of the arguments that it reads.
    """

    apply: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, list[Any]]]
    reads: frozenset[int]


class Chain:
    """A loss cut behind runs of layers: `last(... first(args))` is the loss, with its gradients.

    What depends on no layer (tokens looked up, masks, a table that two of them read) is computed by
    every link that reads it; what does, by the link of the last run that it depends on, and handed
    on to those that read it: the output of an encoder from each link of the decoder to the next.
    What layers count is for the last link alone.

    Attributes:
        runs: Of all stacks, in the order in which they are called.
    """

    def __init__(self, loss: Callable[..., Any], *args: Any):
        """Trace a loss once.

        Args:
            loss: Any function that calls layer stacks, each once.
            args: Its arguments, or their shapes.

        Raises:
            PlanError: See `marked`; or a layer reads what layers before it count.
        """
        self._equations, self._calls, self._out = marked(loss, *args)
        self.runs: tuple[LayerRun, ...] = tuple(eqn.params["call"].layers for eqn in self._calls)
        self._last = len(self._calls) - 1
        self._numbers = {id(eqn): at for at, eqn in enumerate(self._calls)}
        self._behind = self._levels()

    def link(self, start: int, stop: int) -> Link:
        """That of runs `start` to `stop - 1`."""
        ends = stop == len(self._calls)
        known = _Known(self._equations, self._before(start))
        came = self._crossing(start)
        counted = [v for call in self._calls[:start] for v in _sums(call)] if ends else []
        steps = []
        for call in self._calls[start:stop]:
            steps.append((known.step(call.invars), call))
            known.add([call])
        goes = self._equations.outputs if ends else self._crossing(stop)
        final = known.step(goes)

        def apply(args: Sequence[Any], values: Sequence[Any], sums: Sequence[Any]) -> Any:
            names = [*self._equations.inputs, *came, *counted]
            given = [*jax.tree.leaves(tuple(args)), *values, *jax.tree.leaves(list(sums))]
            found, own = dict(zip(names, given, strict=True)), []
            for step, call in steps:
                carry, more = _ran(call, step(found))
                found.update(zip(call.outvars, jax.tree.leaves((carry, more)), strict=True))
                own.append(more)
            out = final(found)
            if ends:
                return jax.tree.unflatten(jax.tree.structure(self._out), out), []
            return out, own

        return Link(apply=apply, reads=known.reads)

    def _levels(self) -> dict[Any, int]:
        """Of each variable that depends on a run, the last of those; of sums, the last of all."""
        behind: dict[Any, int] = {}
        for eqn in self._equations.jaxpr.eqns:
            read = self._equations.variables(eqn.invars)
            level = max((behind.get(v, -1) for v in read), default=-1)
            if eqn.primitive is not RUN:
                behind.update((v, level) for v in eqn.outvars if level >= 0)
                continue
            number, sums = self._numbers[id(eqn)], _sums(eqn)
            if level >= number:
                path = self.runs[number].key[0]
                raise PlanError(
                    f"plan.pipeline.cuts: layers of stack '{path}' read what layers before them"
                    " count, which programs of stages have at the end alone; hand it on in the"
                    " carry, or give mesh axis 'stage' size 1"
                )
            behind.update((v, number) for v in eqn.outvars)
            behind.update((v, self._last) for v in sums)
        return behind

    def _level(self, eqn: Any) -> int:
        if eqn.primitive is RUN:
            return self._numbers[id(eqn)]
        return max((self._behind.get(v, -1) for v in eqn.outvars), default=-1)

    def _before(self, start: int) -> list[Any]:
        """Equations of the links before a run, but for those that every link computes itself."""
        return [eqn for eqn in self._equations.jaxpr.eqns if 0 <= self._level(eqn) < start]

    def _crossing(self, start: int) -> list[Any]:
        """What is handed on to the link that begins with a run."""
        eqns = self._equations.needed(self._equations.outputs, self._before(start))
        late = [eqn for eqn in eqns if self._level(eqn) >= start]
        read = self._equations.crossing(late, self._equations.outputs)
        return [v for v in read if 0 <= self._behind.get(v, -1) < start]


class _Known:
    """What is known while a link is written down: steps, each from what those before it made."""

    def __init__(self, equations: Equations, before: Sequence[Any]):
        self._equations, self._done = equations, list(before)
        places = {variable: at for at, variable in enumerate(equations.inputs)}
        self._places, self._read = places, set()

    @property
    def reads(self) -> frozenset[int]:
        """Leaves of the arguments that the steps read."""
        return frozenset(self._places[v] for v in self._read if v in self._places)

    def add(self, eqns: Iterable[Any]) -> None:
        """These have been computed."""
        self._done += eqns

    def step(self, atoms: Sequence[Any]) -> Callable[[dict[Any, Any]], list[Any]]:
        """`known -> values of atoms`; what is computed on the way is known afterwards."""
        eqns = self._equations.needed(atoms, self._done)
        made = self._equations.made(eqns)
        reads = self._equations.crossing(eqns, atoms)
        run = self._equations.part(eqns, reads, [*made, *atoms])
        self._read.update(reads)
        self.add(eqns)

        def values(known: dict[Any, Any]) -> list[Any]:
            found = run(*(known[v] for v in reads))
            known.update(zip(made, found, strict=False))
            return found[len(made) :]

        return values


def _ran(call: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Carry and sums of a run."""
    of = call.params["call"]
    params, carry, side = jax.tree.unflatten(of.inputs, inputs)
    carry, _, _, sums = Scanned().run(of.layers, params, carry, side, None, None)
    return carry, sums


def _sums(call: Any) -> list[Any]:
    """Variables of what a run's layers count."""
    _, sums = jax.tree.unflatten(jax.tree.structure(call.params["call"].out), call.outvars)
    return jax.tree.leaves(sums)
