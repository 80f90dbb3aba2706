"""Names of saved activations: from the traced program to the compiled one, by call stack."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

Stack = tuple[str, ...]
"""Positions `file.py:line` of a call, innermost first."""

_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
_TRANSPARENT = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p name optimization_barrier pcast pvary"
    " reduce_precision reshape reshard sharding_constraint squeeze transpose".split()
)
"""Primitives that leave the numbers as they are."""


def checkpoint_stacks(jaxpr: Any) -> Mapping[Stack, str]:
    """Names given by `jax.ad_checkpoint.checkpoint_name`, by call stack.

    Compiled text keeps no such name, but the call stack of each operation. The stacks here are
    those of the naming, of the operation that made the named array, and of the changes of layout,
    dtype and sharding between the two.

    Args:
        jaxpr: Of the whole program, `jax.jit(f).trace(...).jaxpr`.
    """
    names: dict[Stack, str] = {}
    for scope in scopes(jaxpr):
        makers = {id(var): eqn for eqn in scope.eqns for var in eqn.outvars}
        for eqn in scope.eqns:
            if eqn.primitive.name == "name":
                for stack in (call_stack(eqn), *_making(eqn.invars[0], makers)):
                    names.setdefault(stack, eqn.params["name"])
    names.pop((), None)
    return names


def scopes(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr and all those inside its equations."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from scopes(inner)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Jaxprs among an equation's parameters."""
    for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        jaxpr = getattr(leaf, "jaxpr", leaf)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def _making(var: Any, makers: Mapping[int, Any]) -> Iterator[Stack]:
    """Call stacks of what made a variable, back to the first operation that computes."""
    eqn = makers.get(id(var))
    if eqn is None:
        return
    yield call_stack(eqn)
    place = next(i for i, out in enumerate(eqn.outvars) if out is var)
    for inner in inner_jaxprs(eqn):
        if len(inner.outvars) == len(eqn.outvars):
            insides = {id(out): made for made in inner.eqns for out in made.outvars}
            yield from _making(inner.outvars[place], insides)
    if eqn.primitive.name in _TRANSPARENT:
        yield from _making(eqn.invars[0], makers)


def call_stack(eqn: Any) -> Stack:
    """Positions outside JAX from which an equation was traced, innermost first."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    return tuple(
        f"{f.file_name}:{f.line_num}" for f in frames if not f.file_name.startswith(_JAX_FOLDER)
    )


def compiled_stacks(hlo: str) -> Mapping[int, Stack]:
    """Call stack per stack frame number, from the tables above a compiled program's text.

    Raises:
        ValueError: A line of the tables cannot be read, or names a line that is not there.
    """
    files = {n: file[1:-1] for n, file in _table(hlo, "FileNames")}
    places = {}
    for number, row in _table(hlo, "FileLocations"):
        places[number] = f"{files[_field(row, 'file_name_id')]}:{_field(row, 'line')}"
    frames = {
        number: (_field(row, "file_location_id"), _field(row, "parent_frame_id", 0))
        for number, row in _table(hlo, "StackFrames")
    }
    # Some versions write parents one too high, so that the first frame is its own parent.
    shift = 1 if frames.get(1, (0, 0))[1] == 1 else 0
    stacks: dict[int, Stack] = {}
    for number, (place, parent) in sorted(frames.items()):
        above = stacks[parent - shift] if parent > shift else ()
        stacks[number] = (places[place], *above)
    return stacks


def _table(hlo: str, name: str) -> Iterator[tuple[int, str]]:
    rows = re.search(rf"^{name}\n(.*?)(?:\n\n|\Z)", hlo, re.M | re.S)
    for row in rows.group(1).splitlines() if rows else ():
        number, _, rest = row.partition(" ")
        if not number.isdigit():
            raise ValueError(f"HLO {name}: no number before {row[:120]!r}")
        yield int(number), rest


def _field(row: str, key: str, default: int | None = None) -> int:
    match = re.search(rf"\b{key}=(\d+)", row)
    if match is None and default is None:
        raise ValueError(f"HLO tables: no {key} in {row[:120]!r}")
    return int(match.group(1)) if match else default  # type: ignore[return-value]


def name_of(stacks: Iterable[Stack], names: Mapping[Stack, str], files: frozenset[str]) -> str:
    """Checkpoint names of operations with these call stacks, joined by `+`; or empty.

    The compiler keeps the innermost frames only, and none of some files: stacks are compared over
    the frames of `files`, as far as the shorter of the two goes.
    """
    known = [(_within(stack, files), name) for stack, name in names.items()]
    agreeing = {name for stack in stacks for other, name in known if _agree(stack, other)}
    return "+".join(sorted(agreeing))


def _within(stack: Stack, files: frozenset[str]) -> Stack:
    return tuple(place for place in stack if place.rpartition(":")[0] in files)


def _agree(one: Stack, other: Stack) -> bool:
    shared = min(len(one), len(other))
    return shared > 0 and one[:shared] == other[:shared]
