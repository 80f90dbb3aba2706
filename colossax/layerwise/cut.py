"""A loss cut at its layer stack, as it is written: for who runs the layers in his own order."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jaxtyping import Array

from colossax.compat import Equations
from colossax.errors import PlanError
from colossax.layerwise.layer import shapes_of
from colossax.layerwise.runs import LayerRun, Scanned, running


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CutRun:
    """One run of the stack that a loss was cut at.

    Attributes:
        layers: How its layers are applied; see `Layer`.
        params: The loss's arguments to the run's stacked parameters.
        leaves: Of each leaf of these, which leaf of the arguments it is; None: it is computed.
        reads: Leaves of the arguments that they depend on.
    """

    layers: LayerRun
    params: Callable[..., Any]
    leaves: tuple[int | None, ...]
    reads: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CutLoss:
    """A loss in three: `after(args, runs(before(args)))` is the loss, in value and gradients.

    Attributes:
        before: `(*args) -> (carry, side, crossing)`: input of the first layer, side inputs of all,
            and arrays that only `after` reads.
        runs: In order; the carry of one is the input of the next.
        after: `(args, outputs, crossing) -> result of the loss`, `outputs` being of each run
            its last layer's carry and its sums `[layers, ...]`.
        enter: `(*args) -> carry` alone, and nothing that it does not need.
        side: Likewise.
        side_reads: Leaves of the arguments that `side` depends on.
        before_reads: Those that the first layer's input depends on.
        after_reads: Those that `after` depends on, by what crosses too.
        taps: Whether `after` reads the carry of a run before the last.
    """

    before: Callable[..., tuple[Any, Any, list[Array]]]
    runs: tuple[CutRun, ...]
    after: Callable[[Sequence[Any], Sequence[Any], Sequence[Array]], Any]
    enter: Callable[..., Any]
    side: Callable[..., Any]
    side_reads: frozenset[int]
    before_reads: frozenset[int]
    after_reads: frozenset[int]
    taps: bool


RUN = Primitive("layer_run")
"""What a run is where a loss is only looked at; its parameter `call` says which."""

RUN.multiple_results = True


@RUN.def_abstract_eval
def _outputs(*_: Any, call: "_Call") -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(call.out)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A run as it was called: which, with what structure of inputs, and shapes of its outputs."""

    layers: LayerRun
    inputs: Any
    out: Any


class Marking:
    """Runs nothing: each run becomes one equation of the loss."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        if jax.tree.leaves((scanned, carried)):
            raise PlanError(
                f"layer stack '{layers.key[0]}': it hands state from layer to layer, so the loss"
                " cannot be cut there; keep such state in the carry"
            )

        inputs = (params, carry, side)
        leaves, structure = jax.tree.flatten(inputs)
        out = self.shapes(layers, *inputs, scanned, carried)
        call = _Call(layers=layers, inputs=structure, out=out)
        self.calls.append(call)
        outputs = RUN.bind(*leaves, call=call)
        carry, sums = jax.tree.unflatten(jax.tree.structure(call.out), outputs)
        return carry, scanned, carried, sums

    def shapes(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> Any:
        """Of the last layer's output, and of all layers' sums."""

        def plain(params: Any, carry: Any, side: Any) -> Any:
            carry, _, _, sums = Scanned().run(layers, params, carry, side, scanned, carried)
            return carry, sums

        return jax.eval_shape(plain, params, carry, side)

    def found(self, program: Any, out: Any) -> "Marked":
        """What was traced with this as the runner.

        Args:
            program: The traced function.
            out: Shapes of what it gives.

        Raises:
            PlanError: It calls no layer stack, or one inside a transformation of its own, or twice.
        """
        calls = [eqn for eqn in program.jaxpr.eqns if eqn.primitive is RUN]
        _check(self.calls, calls)
        return Equations(program), calls, out


Marked = tuple[Equations, list[Any], Any]
"""A loss as equations, those of them that are runs of layers, and shapes of what it gives."""


class _MarkingState(Marking):
    """Likewise, of runs that hand state from layer to layer, or have some of their own."""

    carry: Any = None
    scanned: bool = False

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        self.carry, self.scanned = shapes_of(carry), bool(jax.tree.leaves(scanned))
        inputs = (params, carry, side, scanned, carried)
        leaves, structure = jax.tree.flatten(inputs)
        out = jax.eval_shape(lambda inputs: Scanned().run(layers, *inputs), inputs)
        self.calls.append(_Call(layers=layers, inputs=structure, out=out))
        outputs = RUN.bind(*leaves, call=self.calls[-1])
        return jax.tree.unflatten(jax.tree.structure(out), outputs)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StackCall:
    """How a function calls its layer stack.

    Attributes:
        layers: The run.
        carry: Shapes of the first layer's input.
        out: Of the last one's output.
        scanned: Whether layers have state of their own, beside what is handed on.
        read_past: Leaves of the function's arguments that it reads behind the stack.
    """

    layers: LayerRun
    carry: Any
    out: Any
    scanned: bool
    read_past: frozenset[int]


def stack_call(fn: Callable[..., Any], *args: Any) -> StackCall | None:
    """The one run of a layer stack in a function, if there is one and it can be cut there.

    Args:
        fn: It may hand state through the stack.
        args: Its arguments, or their shapes.

    Cost: the function is traced once.
    """
    marking = _MarkingState()
    with running(marking):
        traced = jax.make_jaxpr(fn)(*args)
    equations = Equations(traced)
    calls = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive is RUN]
    if len(marking.calls) != 1 or len(calls) != 1:
        return None
    return StackCall(
        layers=marking.calls[0].layers,
        carry=marking.carry,
        out=marking.calls[0].out[0],
        scanned=marking.scanned,
        read_past=_read_by(
            equations, equations.needed(equations.outputs, calls), equations.outputs
        ),
    )


def marked(loss: Callable[..., Any], *args: Any) -> Marked:
    """A loss as equations, see `Marked`.

    Args:
        loss: Any function that calls layer stacks.
        args: Its arguments, or their shapes.

    Raises:
        PlanError: It calls none, or one inside a transformation of its own, or twice.
    """
    marking = Marking()
    with running(marking):
        traced, out = jax.make_jaxpr(loss, return_shape=True)(*args)
    return marking.found(traced, out)


def cut_loss(loss: Callable[..., Any], *args: Any) -> CutLoss:
    """Cut a loss at the one layer stack that it calls.

    Args:
        loss: Any function that calls a `LayerStack` once.
        args: Its arguments, or their shapes.

    Raises:
        PlanError: It calls none, several, or one inside a transformation of its own.

    Cost: the loss is traced once. What the layers' input and the rest of the loss both need (a tied
    embedding, gathered) is computed in `before` and crosses.
    """
    return cut_marked(*marked(loss, *args))


def cut_marked(equations: Equations, calls: list[Any], out: Any) -> CutLoss:
    """The same of a loss that is traced already; see `Marked`."""
    _check_one(calls)
    parts = [jax.tree.unflatten(eqn.params["call"].inputs, eqn.invars) for eqn in calls]
    _, carry, side = parts[0]
    start = jax.tree.leaves((carry, side))
    early = equations.needed(start)
    gone = {id(eqn) for eqn in (*early, *calls)}
    late = [eqn for eqn in equations.needed(equations.outputs) if id(eqn) not in gone]
    made = [variable for eqn in calls for variable in eqn.outvars]
    known = {*equations.inputs, *made}
    crossing = [v for v in equations.crossing(late, equations.outputs) if v not in known]
    first = equations.part(early, equations.inputs, [*start, *crossing])
    last = equations.part(late, [*equations.inputs, *made, *crossing], equations.outputs)
    at = jax.tree.structure((carry, side))

    def before(*args: Any) -> tuple[Any, Any, list[Array]]:
        values = first(*jax.tree.leaves(args))
        return *jax.tree.unflatten(at, values[: at.num_leaves]), values[at.num_leaves :]

    def after(args: Sequence[Any], outputs: Sequence[Any], crossing: Sequence[Array]) -> Any:
        values = [*jax.tree.leaves(tuple(args)), *jax.tree.leaves(list(outputs)), *crossing]
        return jax.tree.unflatten(jax.tree.structure(out), last(*values))

    places = {variable: at for at, variable in enumerate(equations.inputs)}
    runs = tuple(
        CutRun(
            layers=eqn.params["call"].layers,
            params=_alone(equations, params),
            leaves=tuple(places.get(variable) for variable in jax.tree.leaves(params)),
            reads=_reads(equations, jax.tree.leaves(params)),
        )
        for eqn, (params, _, _) in zip(calls, parts, strict=True)
    )
    return CutLoss(
        before=before,
        runs=runs,
        after=after,
        enter=_alone(equations, carry),
        side=_alone(equations, side),
        side_reads=_reads(equations, jax.tree.leaves(side)),
        before_reads=_reads(equations, jax.tree.leaves(carry)),
        after_reads=_reads(equations, equations.outputs, gone=calls),
        taps=_are_read(late, [v for run in calls[:-1] for v in _carry(run)]),
    )


def _alone(equations: Equations, variables: Any) -> Callable[..., Any]:
    """The loss's arguments to these."""
    leaves, structure = jax.tree.flatten(variables)
    part = equations.part(equations.needed(leaves), equations.inputs, leaves)
    return lambda *args: jax.tree.unflatten(structure, part(*jax.tree.leaves(args)))


def _reads(equations: Equations, atoms: Sequence[Any], gone: Sequence[Any] = ()) -> frozenset[int]:
    """Leaves of the arguments that these depend on, but for what equations that are gone read."""
    own = equations.needed(atoms, gone)
    return _read_by(equations, own, atoms)


def _read_by(equations: Equations, own: Sequence[Any], atoms: Sequence[Any]) -> frozenset[int]:
    """Leaves of the arguments that these equations read, or that are among these."""
    return frozenset(
        at
        for at, variable in enumerate(equations.inputs)
        if _are_read(own, [variable]) or any(variable is atom for atom in atoms)
    )


def _are_read(equations: Sequence[Any], variables: Sequence[Any]) -> bool:
    wanted = {id(variable) for variable in variables}
    return any(id(atom) in wanted for eqn in equations for atom in eqn.invars)


def _carry(run: Any) -> list[Any]:
    """Variables of the carry that a run gives."""
    carry, _ = jax.tree.unflatten(jax.tree.structure(run.params["call"].out), run.outvars)
    return jax.tree.leaves(carry)


def _check(called: Sequence[_Call], calls: Sequence[Any]) -> None:
    """Stacks are called, each once, outside of transformations."""
    if not called:
        raise PlanError("loss: it calls no layer stack, so there is nothing to cut it at")
    path = called[0].layers.key[0]
    if len(called) != len(calls):
        raise PlanError(
            f"loss: it calls the layer stack '{path}' inside a transformation of its own (a loop, a"
            " branch, vmap, jit or checkpoint), where it cannot be cut; call it outside of them"
        )
    if len({call.layers.key for call in called}) != len(called):
        raise PlanError(f"loss: it calls the layer stack '{path}' more than once; call it once")


def _check_one(calls: Sequence[Any]) -> None:
    """All of one stack."""
    paths = [eqn.params["call"].layers.key[0] for eqn in calls]
    path = paths[0]
    others = sorted(set(paths) - {path})
    if others:
        raise PlanError(
            f"loss: it calls the layer stacks '{path}' and '{others[0]}', and can be cut at one;"
            " make them one stack of several kinds, or give plan.pipeline.cuts, the layers of each"
            " stage"
        )
