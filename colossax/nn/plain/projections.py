"""What the matrices of a model are: maps into a block, maps out of it, tables.

Read off the modules alone, in the order in which they were made; nothing is computed.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.nn.named_models import MakeModel
from colossax.nn.plain.members import BIASES, children, equation_roles, held_params, stacked_dims
from colossax.nn.rngs import fresh_rngs
from colossax.typing import Dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A matrix, or another array of two dims or more, with its bias.

    Attributes:
        path: Of the array.
        shape: Its sizes, in a stack those of one layer.
        roles: A letter for each of its last dims: `i` for those that the input has too, `o` for
            those of the output, `-` for others.
        table: Whether its rows are looked up.
        positions: Whether it is added to what stands at each position.
        bias: Path and shape of the bias, or None.
        stacked: How many dims of layers stand before those of `shape`.
        adapters: Paths and shapes of matrices of low rank that are added to it.
    """

    path: str
    shape: tuple[int, ...]
    roles: str
    table: bool = False
    positions: bool = False
    bias: tuple[str, tuple[int, ...]] | None = None
    stacked: int = 0
    adapters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def sizes(self, role: str) -> tuple[int, ...]:
        """Sizes of the dims that have a role."""
        sizes = self.shape[len(self.shape) - len(self.roles) :]
        return tuple(n for n, r in zip(sizes, self.roles, strict=True) if r == role)

    @property
    def reads(self) -> int:
        """Numbers of an input."""
        return math.prod(self.sizes("i"))

    @property
    def writes(self) -> int:
        """Numbers of an output."""
        return math.prod(self.sizes("o"))

    @property
    def looked_up(self) -> bool:
        """Whether it is no map."""
        return self.table or self.positions

    def row_names(self) -> Dims:
        """Names of what is looked up."""
        rows = "vocab" if not self.positions and len(self.shape) == 2 else None
        return (*(None,) * (self.stacked + len(self.shape) - 2), rows, "embed")

    def names(self, inward: bool, vocab: bool) -> dict[str, Dims]:
        """Names by path, of a map: of the matrix, of the bias as the output's, of adapters.

        Args:
            inward: Whether it leads from the residual stream into a block.
            vocab: Whether its output, then, is the vocabulary.
        """
        stream, inside = ("i", "o") if inward else ("o", "i")
        by_role = {
            stream: iter(_stream_names(len(self.sizes(stream)))),
            inside: iter(_inside_names(len(self.sizes(inside)), vocab and inward)),
            "-": iter((None,) * len(self.roles)),
        }
        dims = [next(by_role[role]) for role in self.roles]
        found = {self.path: (*(None,) * (self.stacked + len(self.shape) - len(dims)), *dims)}
        if self.bias is not None:
            path, shape = self.bias
            # Without `head_dim`, whose name would keep a bias from decaying.
            out = [d for d, r in zip(dims, self.roles, strict=True) if r == "o"]
            if shape[len(shape) - len(out) :] == self.sizes("o"):
                kept = [None if dim == "head_dim" else dim for dim in out]
                found[path] = (*(None,) * (len(shape) - len(out)), *kept)
        return found | self._adapter_names(dims)

    def _adapter_names(self, dims: Sequence[str | None]) -> dict[str, Dims]:
        """The input's name for the first matrix, the output's for the second; none for the rank."""
        found: dict[str, Dims] = {}
        for path, shape in self.adapters:
            role, at = ("i", -2) if path.endswith("a") else ("o", -1)
            if self.sizes(role) == (shape[at],):
                name = dims[self.roles.index(role)]
                pair = (name, None) if role == "i" else (None, name)
                found[path] = (*(None,) * (len(shape) - 2), *pair)
        return found


def _stream_names(count: int) -> Dims:
    return ("embed", *(None,) * (count - 1))


def _inside_names(count: int, vocab: bool) -> Dims:
    if count == 1:
        return ("vocab" if vocab else "mlp",)
    return (*(None,) * (count - 2), "heads", "head_dim")


QKV = 3
"""Maps that attention has of what it reads."""


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a parameter may be named.

    Attributes:
        names: Of its dims, in order of preference.
        matrix: Path of the matrix whose way it goes: its own, or that of a bias's map.
    """

    names: tuple[Dims, ...]
    matrix: str


def found_names(make_model: MakeModel) -> dict[str, Ways]:
    """Names for the parameters of a model by what its modules are, in order of preference.

    Maps of one module are taken in the order in which they were made. One whose input is what an
    earlier one of them writes leads out, as do the last of several square ones and those that read
    heads; the others lead in. In a list or `nnx.Sequential` each reads what the one before writes.
    So an MLP, gated or not, and attention's q, k, v and o come out as one would write them. A guess
    that is wrong costs bytes and changes no result. A convolution is a map of its channels, and so
    is every array of which no equation tells what its dims are. Kernels split by inputs and outputs
    have to be gathered before use: JAX 0.10.2's compiler gets `conv(silu(conv(x, a)), b)` and its
    gradients wrong on CPUs where they are split in two ways and the batch in a third.

    In what `nnx.vmap` or `nnx.scan` stacked, names are those of one layer. The stacked dim has
    none: as `layers` it would keep biases from decaying, and names change no result.

    Args:
        make_model: The factory; it is traced.

    Returns:
        By path; parameters about which nothing is known are left out.

    Reference: Redco (Tan et al. 2023), which splits maps in and out of a block in these two ways.
    """
    names: dict[str, Ways] = {}

    def trace() -> jax.Array:
        model = make_model(fresh_rngs(0))
        runs = list(_runs(model, ()))
        tables = {p.shape for run, _ in runs for p in run if p.table and not p.positions}
        for run, chained in runs:
            maps = [one for one in run if not one.looked_up]
            for one in run:
                if one.looked_up:
                    names[one.path] = Ways((_looked_up(one, maps),), one.path)
            heads = [_is_head(one, maps[at + 1 :], tables) for at, one in enumerate(maps)]
            for one, inward, head in zip(maps, _inward(maps, chained, heads), heads, strict=True):
                names.update(_ways(one, inward, head))
        return jnp.zeros(())

    with nnx.use_eager_sharding(False):
        jax.eval_shape(trace)
    return names


def _looked_up(one: Projection, maps: Sequence[Projection]) -> Dims:
    """Of a table beside maps: a number for each of their heads, or what else stands in rows.

    Attention's q, k and v write a multiple of it, and none of its maps reads or writes as much.
    """
    wider = [m for m in maps if m.writes > one.writes and m.writes % one.writes == 0]
    apart = all(one.writes not in (m.reads, m.writes) for m in maps)
    names = one.row_names()
    return (*names[:-2], None, "heads") if apart and len(wider) >= QKV else names


def _ways(one: Projection, inward: bool, vocab: bool) -> dict[str, Ways]:
    """By path, of a map and what belongs to it."""
    ways = [one.names(inward, vocab), one.names(not inward, vocab)]
    return {path: Ways(tuple(way[path] for way in ways), one.path) for path in ways[0]}


def _is_head(one: Projection, later: Sequence[Projection], tables: set[tuple[int, ...]]) -> bool:
    """Whether its output is the vocabulary: it has a table's sizes, and no later map reads it."""
    return (one.writes, one.reads) in tables and not any(o.reads == one.writes for o in later)


def _inward(run: Sequence[Projection], chained: bool, heads: Sequence[bool]) -> list[bool]:
    """Whether each of the maps of a module leads into a block."""
    found: list[bool] = []
    wide: set[int] = set()
    """Outputs of the maps in that no map out has read yet."""
    for number, one in enumerate(run):
        later = run[number + 1 :]
        several = len(one.sizes("i")) > 1, len(one.sizes("o")) > 1
        if several[0] != several[1]:
            inward = several[1]
        elif heads[number]:
            inward = True
        elif one.reads in wide:
            inward = False
        else:
            inward = chained or not _last_square(one, number, later, wide)
        found.append(inward)
        if not inward or chained:
            wide.clear()
        if inward and (chained or one.reads != one.writes):
            wide.add(one.writes)
    return found


def _last_square(one: Projection, number: int, later: Sequence[Projection], wide: set[int]) -> bool:
    """Whether it is the `o` of attention."""
    if number == 0 or one.reads != one.writes:
        return False
    return not any(
        other.reads in wide or (other.reads == other.writes == one.reads) for other in later
    )


def _runs(
    module: Any, path: tuple, above: tuple[int, ...] = (), stacked: int = 0
) -> Iterator[tuple[list[Projection], bool]]:
    """Maps that stand beside one another in a module, without blocks in between; all modules."""
    run: list[Projection] = []
    chained = isinstance(module, nnx.List | list | tuple)
    above, stacked = (*above, id(module)), max(stacked, stacked_dims(module))
    sorted_ = stacked > 0 and not chained
    for name, child in children(module):
        if id(child) in above:
            continue  # a module may know the one that holds it
        own = _alone(child, (*path, name), above, stacked)
        inner = list(_runs(child, (*path, name), above, stacked))
        if own is not None:
            run.append(own)
            yield from _others(inner, own)
        else:
            if not sorted_ and any(one for one, _ in inner):
                yield run, chained
                run = []
            yield from inner
    yield _likely_order(run) if sorted_ else run, chained


_OUT = re.compile(r"^(c_|w_?)?(o|out|output|proj)(_|$)")


def _likely_order(run: list[Projection]) -> list[Projection]:
    """The order of a block's maps where Flax's transforms left that of the alphabet.

    First those that no other reads, then attention's squares, of which `o` is the last, then what
    widens and what narrows.
    """
    read = {one.reads for one in run if one.reads != one.writes}

    def place(one: Projection) -> tuple[int, bool]:
        name = one.path.split("/")[-2 if "/" in one.path else -1].lower()
        if one.reads == one.writes:
            return 1, bool(_OUT.search(name))
        return (0 if one.writes not in read else 2 + (one.reads > one.writes)), False

    return sorted(run, key=place)


def _others(
    runs: Sequence[tuple[list[Projection], bool]], own: Projection
) -> Iterator[tuple[list[Projection], bool]]:
    """What else a module holds beside its own map."""
    known = {own.path, *(path for path, _ in own.adapters)}
    known |= {own.bias[0]} if own.bias is not None else set()
    for run, chained in runs:
        if rest := [one for one in run if one.path not in known]:
            yield rest, chained


_ADAPTERS = ("lora_a", "lora_b")


def _alone(node: Any, path: tuple, above: tuple[int, ...], stacked: int) -> Projection | None:
    """A parameter of its own, or that of a module which has just one of two dims or more.

    A module's own `kernel` is that of the module, whatever else it holds.
    """
    if isinstance(node, nnx.Param):
        return _projection(None, path, node, stacked) if _matrix(node, stacked) else None
    stacked, above = max(stacked, stacked_dims(node)), (*above, id(node))
    params = {n: child for n, child in children(node) if isinstance(child, nnx.Param)}
    inner = {n: child for n, child in children(node) if id(child) not in above}
    inner = {n: child for n, child in inner.items() if n not in params}
    matrices = [name for name, child in params.items() if _matrix(child, stacked)]
    if "kernel" in matrices:  # attention's biases have two dims as well
        matrices = ["kernel"]
    elif set(matrices) == set(_ADAPTERS):
        return _adapted(node, path, inner, above, stacked)
    elif any(run for child in inner.values() for run, _ in _runs(child, (), above, stacked)):
        return None
    if len(matrices) != 1:
        return None
    [name] = matrices
    bias = next((n for n in params if n in BIASES), None)
    own = _projection(node, (*path, name), params[name], stacked)
    return dataclasses.replace(
        own,
        bias=None if bias is None else (_label((*path, bias)), tuple(params[bias].shape)),
        adapters=_adapters(node, path),
    )


def _adapted(
    node: Any, path: tuple, inner: dict[Any, Any], above: tuple[int, ...], stacked: int
) -> Projection | None:
    """The one map that a module holds and adapts."""
    found = [_alone(child, (*path, name), above, stacked) for name, child in inner.items()]
    maps = [one for one in found if one is not None]
    return dataclasses.replace(maps[0], adapters=_adapters(node, path)) if len(maps) == 1 else None


def _adapters(node: Any, path: tuple) -> tuple[tuple[str, tuple[int, ...]], ...]:
    held = [(p, param) for _, p, param in held_params(node, path) if p[-1] in _ADAPTERS]
    return tuple((_label(p), tuple(param.shape)) for p, param in held)


def _matrix(param: nnx.Param, stacked: int) -> bool:
    return param.ndim - stacked >= 2 and math.prod(param.shape[stacked:-1]) > 1


_POSITIONS = re.compile(r"(^|_)(pos(ition(s|al)?|embed(ding)?|emb)?|wpe)(_|$)")

_TABLE = re.compile(r"(^|_)embed(s|der|ding|dings)?(_|$)")

_MAP = re.compile(r"(^|_)(proj|projection|linear|dense|kernel|patch)(_|$)")


def _projection(module: Any, path: tuple, param: nnx.Param, stacked: int) -> Projection:
    shape = tuple(param.shape)[stacked:]
    own = module is None or not type(module).__module__.startswith("flax.")
    table = isinstance(module, nnx.Embed)
    name = str(path[-2 if table and len(path) > 1 else -1]).lower()
    positions = (own or table) and bool(_POSITIONS.search(name))
    embeds = bool(_TABLE.search(name)) and not _MAP.search(name)
    return Projection(
        path=_label(path),
        shape=shape,
        roles=_roles(module, shape),
        table=table or (own and embeds and not positions),
        positions=positions,
        stacked=stacked,
    )


def _roles(module: Any, shape: tuple[int, ...]) -> str:
    """Of its last dims."""
    if isinstance(module, nnx.LinearGeneral):
        return "i" * len(module.in_features) + "o" * len(module.out_features)
    if isinstance(module, nnx.ConvTranspose) and module.transpose_kernel:
        return "oi"
    roles = equation_roles(module)
    return roles if roles and len(roles) <= len(shape) else "io"


def _label(path: tuple) -> str:
    return "/".join(map(str, path))
