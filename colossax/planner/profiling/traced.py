"""A layer as it was traced for one device: matmuls with parameters, and what each policy keeps.

Traced with nothing recomputed, a layer is a list of equations from parameters and carry to its
output and to all that backward needs. What a policy keeps of it are the arrays it names, and what
it computes again are the equations between those and what backward needs. So one trace prices every
policy.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from colossax.aot.saved import inner_jaxprs
from colossax.config import SAVEABLE
from colossax.planner.counting.traced_flops import equation_flops

_SAME = frozenset("convert_element_type name reshape transpose copy squeeze".split())
"""Primitives that hand a parameter on to what multiplies it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map:
    """A matmul with a parameter.

    Attributes:
        leaf: Number of the parameter among those of the layer.
        flops: Forward.
        first: Whether it contracts the parameter's first dims, else its last ones.
        contracted: How many.
        reads: Number of the equation that made its other factor; maps of one share its gather.
        grouped: Whether each row is multiplied by one of several matrices, in a kernel.
    """

    leaf: int
    flops: float
    first: bool
    contracted: int
    reads: int
    grouped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptArray:
    """What backward gets of a layer by a name.

    Attributes:
        name: See `SAVEABLE`; `input` is the layer's own.
        shape: For the tokens that were traced.
        itemsize: Bytes of a number.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """What one call of a layer takes, for the tokens it was traced with.

    Attributes:
        maps: Matmuls with parameters, in order.
        other_flops: Of all other matmuls, forward; kernels that do not say theirs have none.
        counted_flops: All that can be read off the trace, forward: of kernels less than they do.
        kept: Arrays that have a name of `SAVEABLE`, and the layer's input.
        again: By set of names kept, which maps backward computes again, and what share of
            `other_flops`.
        opaque: Whether kernels stand between names, which are computed again where their output is
            not kept: the sets of names for which they are.
        scores: Bytes in float32 of the most that attention makes at once of pairs of tokens, where
            it does so outside of kernels.
    """

    maps: tuple[Map, ...]
    other_flops: float
    counted_flops: float
    kept: tuple[KeptArray, ...]
    again: Mapping[frozenset[str], tuple[frozenset[int], float]]
    opaque: frozenset[frozenset[str]]
    scores: float = 0.0


def traced(equations: Any, parameters: int, outputs: int, carry: int) -> TracedLayer:
    """Read a layer's forward pass.

    Args:
        equations: Of `jax.vjp`, whose inputs begin with the parameters and then the carry, and
            whose outputs with the layer's own.
        parameters: How many leaves those are.
        outputs: How many of the outputs are not there for backward.
        carry: How many leaves the carry has.
    """
    jaxpr = equations.jaxpr
    makers = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    leaves = {var: at for at, var in enumerate(jaxpr.invars[:parameters])}
    origin = _Origins(jaxpr.eqns, makers, leaves)
    found: dict[int, Map] = {}
    other: dict[int, float] = {}
    for at, eqn in enumerate(jaxpr.eqns):
        one = _map_of(at, eqn, origin)
        flops = equation_flops(eqn)
        if one is not None:
            found[at] = one
        elif flops:
            other[at] = flops
    named = {
        at: eqn.params["name"]
        for at, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == "name" and eqn.params["name"] in SAVEABLE
    }
    kept = [_kept("input", var) for var in jaxpr.invars[parameters : parameters + carry]]
    kept += [_kept(name, jaxpr.eqns[at].outvars[0]) for at, name in named.items()]
    order = {at: number for number, at in enumerate(found)}
    # Experts keep their input alone (`sharding.experts`); their last matmul is not needed again.
    grouped = [at for at, one in found.items() if one.grouped][:-1]
    total, again, opaque = sum(other.values(), 0.0), {}, set()
    names = sorted(set(named.values()))
    kernels = _attending(jaxpr.eqns, named, origin) - found.keys()
    for kept_names in _subsets(names):
        stops = {at for at, name in named.items() if name in kept_names}
        needed = _needed(jaxpr.eqns, makers, jaxpr.outvars[outputs:], stops)
        share = sum(other[at] for at in needed & other.keys()) / total if total else 0.0
        anew = (needed & found.keys()).union(grouped)
        again[kept_names] = (frozenset(order[at] for at in anew), share)
        if needed & kernels:
            opaque.add(kept_names)
    return TracedLayer(
        maps=tuple(found.values()),
        other_flops=total,
        counted_flops=sum(map(equation_flops, jaxpr.eqns), 0.0),
        kept=tuple(kept),
        again=again,
        opaque=frozenset(opaque),
        scores=max(
            (_scores(eqn) for at, eqn in enumerate(jaxpr.eqns) if at not in found), default=0
        ),
    )


class _Origins:
    """From a variable to the parameter that it is, in another shape, dtype or form."""

    def __init__(self, eqns: Sequence[Any], makers: Mapping[Any, int], leaves: Mapping[Any, int]):
        self._eqns, self._makers = eqns, makers
        self._params = {var: (leaf, var) for var, leaf in leaves.items()}
        for eqn in eqns:
            read = [var for var in eqn.invars if not _literal(var)]
            found = [self._params[var] for var in read if var in self._params]
            if found and len(found) == len(read):  # as codes and scales, of which codes are more
                largest = max(found, key=lambda one: math.prod(one[1].aval.shape))
                self._params.update(dict.fromkeys(eqn.outvars, largest))

    def leaf(self, var: Any) -> tuple[int, Any] | None:
        """Number and variable of the parameter; None for what depends on more than those."""
        return None if _literal(var) else self._params.get(var)

    def source(self, var: Any) -> int:
        """Number of the equation that computed it, changes of shape apart; -1 for an input."""
        while (at := self._made(var)) is not None:
            if self._eqns[at].primitive.name not in _SAME:
                return at
            var = self._eqns[at].invars[0]
        return -1

    def _made(self, var: Any) -> int | None:
        return None if _literal(var) else self._makers.get(var)


def _map_of(at: int, eqn: Any, origin: _Origins) -> Map | None:
    if eqn.primitive.name == "dot_general":
        sides = enumerate(map(origin.leaf, eqn.invars))
        given = [(n, found) for n, found in sides if found is not None]
        if len(given) != 1:
            return None
        ((side, (leaf, whole)),) = given
        contracted = eqn.params["dimension_numbers"][0][side]
        shape = eqn.invars[side].aval.shape
        first, count = _contracted(whole.aval.shape, shape, contracted)
        reads = origin.source(eqn.invars[1 - side])
        flops = equation_flops(eqn)
        return Map(leaf=leaf, flops=flops, first=first, contracted=count, reads=reads)
    if not _kernel(eqn):
        return None
    found = [(origin.leaf(var), var) for var in eqn.invars]
    given = [leaf for leaf, _ in found if leaf is not None]
    rows = [var for leaf, var in found if leaf is None and len(getattr(var.aval, "shape", ())) > 1]
    if not given or not rows:
        return None
    leaf, _ = max(given, key=lambda one: math.prod(one[1].aval.shape))
    reads = origin.source(rows[0])
    # A grouped matmul: rows of one factor, each with one matrix of the other.
    matrices = [var for leaf, var in found if leaf and len(var.aval.shape) == 3]
    if matrices and len(rows[0].aval.shape) == 2:
        flops = 2.0 * rows[0].aval.shape[0] * math.prod(matrices[0].aval.shape[1:])
        return Map(leaf=leaf, flops=flops, first=True, contracted=2, reads=reads, grouped=True)
    # A matrix in codes, with a gradient of its own.
    flops = equation_flops(eqn)
    return Map(leaf=leaf, flops=flops, first=True, contracted=1, reads=reads) if flops else None


def _contracted(
    whole: Sequence[int], shape: Sequence[int], contracted: Sequence[int]
) -> tuple[bool, int]:
    """Whether a parameter's first dims are contracted, and how many, by their sizes."""
    size = math.prod(shape[dim] for dim in contracted)
    first = 0 in contracted
    dims = whole if first else whole[::-1]
    products = list(itertools.accumulate(dims, lambda a, b: a * b))
    return first, products.index(size) + 1 if size in products else 1


def _attending(eqns: Sequence[Any], named: Mapping[int, str], origin: _Origins) -> set[int]:
    """Kernels that make what is named `attention`; where nothing is, all of them."""
    made = {origin.source(eqns[at].invars[0]) for at, name in named.items() if name == "attention"}
    return {at for at, eqn in enumerate(eqns) if _kernel(eqn) and (at in made or not made)}


def _scores(eqn: Any) -> float:
    """Bytes in float32 of the largest product of two heads' rows that an equation makes."""
    if eqn.primitive.name == "dot_general":
        (_, (batch, _)) = eqn.params["dimension_numbers"]
        return 4.0 * math.prod(eqn.outvars[0].aval.shape) if len(batch) > 1 else 0.0
    if _kernel(eqn):
        return 0.0
    return max((_scores(one) for inner in inner_jaxprs(eqn) for one in inner.eqns), default=0.0)


def _kernel(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name.startswith(("custom_vjp_call", "pallas_call", "dot_product_attention", "ragged"))


def _kept(name: str, var: Any) -> KeptArray:
    return KeptArray(name=name, shape=tuple(var.aval.shape), itemsize=var.aval.dtype.itemsize)


def _needed(
    eqns: Sequence[Any], makers: Mapping[Any, int], outputs: Iterable[Any], stops: set[int]
) -> set[int]:
    """Equations that these depend on, as far back as those whose outputs are kept."""
    found: set[int] = set()
    open_ones = [var for var in outputs if not _literal(var)]
    while open_ones:
        at = makers.get(open_ones.pop())
        if at is None or at in found or at in stops:
            continue
        found.add(at)
        open_ones += [var for var in eqns[at].invars if not _literal(var)]
    return found


def _subsets(names: Sequence[str]) -> Iterable[frozenset[str]]:
    for count in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, count))


def _literal(var: Any) -> bool:
    return hasattr(var, "val")
