"""Loops of a backward pass in two: what the layer before waits for, and what nobody does."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from colossax.compat import Equations, inlined, scan_counts


def loops_apart(traced: Any, first: int) -> Any:
    """The same program, each scan of which the outputs from `first` on need a part in two of them.

    The first scan has what they need: what is carried, and what each turn gives for that. The
    second, over what the first leaves of each turn, has no carry. Nothing is done twice.

    Args:
        traced: As `inlined` gives it.
        first: Number of the first output that is wanted first; all after it are.

    Cost: what a turn of the first scan leaves for the second, of all turns: as `Layer.apart` of
    one turn, times their number.
    """
    equations = Equations(traced)
    wanted = equations.outputs[first:]
    needed = equations.needed(wanted)
    read = {id(atom) for eqn in needed for atom in eqn.invars} | {id(atom) for atom in wanted}
    instead = {}
    for eqn in needed:
        if eqn.primitive.name == "scan":
            early = [id(variable) in read for variable in eqn.outvars]
            if not all(early[scan_counts(eqn.params)[1] :]):
                instead[id(eqn)] = functools.partial(_in_two, eqn.params, early)
    return inlined(traced, instead) if instead else traced


def _in_two(params: Any, early: Sequence[bool], *values: Any) -> list[Any]:
    """Outputs of a scan whose turns give some of theirs early."""
    consts, carried = scan_counts(params)
    rest = values[consts:]
    xs = list(rest[carried:])
    body = Equations(inlined(params["jaxpr"]))
    outs = list(zip(body.outputs[carried:], early[carried:], strict=True))
    first = [*body.outputs[:carried], *(y for y, now in outs if now)]
    second = [y for y, now in outs if not now]
    known = dict(zip(body.inputs[:consts], values[:consts], strict=True))
    rows = {variable: at for at, variable in enumerate(body.inputs[consts + carried :])}
    one, two, crossing = body.split(first, second, [*known, *rows])
    left = [variable for variable in crossing if variable not in known and variable not in rows]

    def now(carry: Any, row: Any) -> Any:
        found = one(*values[:consts], *carry, *row)
        over = dict(zip(crossing, found[len(first) :], strict=True))
        return found[:carried], (found[carried : len(first)], [over[v] for v in left])

    def later(_: Any, given: Any) -> Any:
        row, pending = given
        there = {**known, **{v: row[at] for v, at in rows.items()}}
        there.update(zip(left, pending, strict=True))
        return (), two(*(there[v] for v in crossing))

    how = {"length": params["length"], "reverse": params["reverse"]}
    carry, (found, pending) = jax.lax.scan(now, list(rest[:carried]), xs, **how)
    _, others = jax.lax.scan(later, (), (xs, pending), **how)
    ys = {True: iter(found), False: iter(others)}
    return [*carry, *(next(ys[now]) for _, now in outs)]
