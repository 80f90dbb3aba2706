"""What the matrices of a model are: maps into a block, maps out of it, tables.

Read off the modules alone, in the order in which they were made; nothing is computed.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from colossax.nn.named_models import MakeModel
from colossax.typing import Dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A matrix, or another array of two dims or more, with its bias.

    Attributes:
        path: Of the array.
        shape: Its sizes.
        roles: A letter for each of its last dims: `i` for those that the input has too, `o` for
            those of the output, `-` for others.
        convolves: Whether it is the kernel of a convolution.
        table: Whether its rows are looked up.
        positions: Whether it is added to what stands at each position.
        bias: Path and shape of the bias, or None.
    """

    path: str
    shape: tuple[int, ...]
    roles: str
    convolves: bool = False
    table: bool = False
    positions: bool = False
    bias: tuple[str, tuple[int, ...]] | None = None

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
        rows = "vocab" if self.table and len(self.shape) == 2 else None
        return (*(None,) * (len(self.shape) - 2), rows, "embed")

    def names(self, inward: bool, vocab: bool) -> dict[str, Dims]:
        """Names by path, of a map: of the matrix, and of the bias as the output's.

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
        found = {self.path: (*(None,) * (len(self.shape) - len(dims)), *dims)}
        if self.bias is not None:
            path, shape = self.bias
            # Without `head_dim`, whose name would keep a bias from decaying.
            out = [d for d, r in zip(dims, self.roles, strict=True) if r == "o"]
            if shape[len(shape) - len(out) :] == self.sizes("o"):
                kept = [None if dim == "head_dim" else dim for dim in out]
                found[path] = (*(None,) * (len(shape) - len(out)), *kept)
        return found


def _stream_names(count: int) -> Dims:
    return ("embed", *(None,) * (count - 1))


def _inside_names(count: int, vocab: bool) -> Dims:
    if count == 1:
        return ("vocab" if vocab else "mlp",)
    return (*(None,) * (count - 2), "heads", "head_dim")


def found_names(make_model: MakeModel) -> dict[str, tuple[Dims, ...]]:
    """Names for the parameters of a model by what its modules are, in order of preference.

    Maps of one module are taken in the order in which they were made. One whose input is what an
    earlier one of them writes leads out, as do the last of several square ones and those that read
    heads; the others lead in. In a list or `nnx.Sequential` each reads what the one before writes.
    So an MLP, gated or not, and attention's q, k, v and o come out as one would write them. A guess
    that is wrong costs bytes and changes no result. Of a convolution one dim alone has a name: JAX
    0.10.2's compiler gets `conv(silu(conv(x, a)), b)` and its gradients wrong where kernels are
    split by their inputs over one axis and by their outputs over another.

    Args:
        make_model: The factory; it is traced.

    Returns:
        By path; parameters about which nothing is known are left out.

    Reference: Redco (Tan et al. 2023), which splits maps in and out of a block in these two ways.
    """
    names: dict[str, tuple[Dims, ...]] = {}

    def trace() -> jax.Array:
        model = make_model(nnx.Rngs(0))
        runs = list(_runs(model, ()))
        tables = {p.shape for run, _ in runs for p in run if p.table}
        for run, chained in runs:
            maps = [one for one in run if not one.looked_up]
            names.update({one.path: (one.row_names(),) for one in run if one.looked_up})
            for one, inward in zip(maps, _inward(maps, chained, tables), strict=True):
                names.update(_ways(one, inward, (one.writes, one.reads) in tables))
        return jnp.zeros(())

    with nnx.use_eager_sharding(False):
        jax.eval_shape(trace)
    return names


_NORMS = nnx.LayerNorm | nnx.RMSNorm | nnx.GroupNorm | nnx.BatchNorm | nnx.InstanceNorm


def _ways(one: Projection, inward: bool, vocab: bool) -> dict[str, tuple[Dims, ...]]:
    """Names by path, of a map, in order of preference."""
    ways = [one.names(inward, vocab), one.names(not inward, vocab)]
    if one.convolves:
        into, out = one.names(True, False), one.names(False, False)
        ways = [_only("embed", into), _only("embed", out), _only("mlp", into)]
    return {path: tuple(way[path] for way in ways) for path in ways[0]}


def _only(name: str, names: dict[str, Dims]) -> dict[str, Dims]:
    return {path: tuple(d if d == name else None for d in dims) for path, dims in names.items()}


def _inward(run: Sequence[Projection], chained: bool, tables: set[tuple[int, ...]]) -> list[bool]:
    """Whether each of the maps of a module leads into a block."""
    found: list[bool] = []
    wide: set[int] = set()
    """Outputs of the maps in that no map out has read yet."""
    for number, one in enumerate(run):
        later = run[number + 1 :]
        several = len(one.sizes("i")) > 1, len(one.sizes("o")) > 1
        if several[0] != several[1]:
            inward = several[1]
        elif (one.writes, one.reads) in tables:
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
    module: Any, path: tuple, above: tuple[int, ...] = ()
) -> Iterator[tuple[list[Projection], bool]]:
    """Maps that stand beside one another in a module, without blocks in between; all modules."""
    run: list[Projection] = []
    chained = isinstance(module, nnx.List | list | tuple)
    above = (*above, id(module))
    for name, child in _children(module):
        if id(child) in above:
            continue  # a module may know the one that holds it
        own = _alone(child, (*path, name), above)
        if own is not None:
            run.append(own)
        elif not isinstance(child, nnx.Variable):
            inner = list(_runs(child, (*path, name), above))
            if any(one for one, _ in inner):
                yield run, chained
                run = []
            yield from inner
    yield run, chained


def _children(module: Any) -> Iterable[tuple[Any, Any]]:
    """Parameters and what may hold such, in the order in which they were given."""
    if isinstance(module, list | tuple):
        children: Iterable[tuple[Any, Any]] = enumerate(module)
    elif isinstance(module, dict):
        children = module.items()
    else:
        children = vars(module).items() if isinstance(module, nnx.Module) else ()
        children = () if isinstance(module, _NORMS) else children
    kinds = nnx.Param | nnx.Module | list | tuple | dict
    return [(name, child) for name, child in children if isinstance(child, kinds)]


def _alone(node: Any, path: tuple, above: tuple[int, ...]) -> Projection | None:
    """A parameter of its own, or that of a module which has just one of two dims or more."""
    if isinstance(node, nnx.Param):
        return _projection(None, path, node, None) if _matrix(node) else None
    params = {n: child for n, child in _children(node) if isinstance(child, nnx.Param)}
    inner = [child for _, child in _children(node) if id(child) not in above]
    inner = [child for child in inner if not isinstance(child, nnx.Param)]
    if any(run for child in inner for run, _ in _runs(child, (), (*above, id(node)))):
        return None
    matrices = [name for name, child in params.items() if _matrix(child)]
    if "kernel" in matrices:  # attention's biases have two dims as well
        matrices = ["kernel"]
    if len(matrices) != 1:
        return None
    [name] = matrices
    bias = next(((n, child) for n, child in params.items() if n in ("bias", "b")), None)
    if bias is not None:
        bias = (_label((*path, bias[0])), tuple(bias[1].shape))
    return _projection(node, (*path, name), params[name], bias)


def _matrix(param: nnx.Param) -> bool:
    return param.ndim >= 2 and math.prod(param.shape[:-1]) > 1


def _projection(
    module: Any, path: tuple, param: nnx.Param, bias: tuple[str, tuple[int, ...]] | None
) -> Projection:
    shape = tuple(param.shape)
    roles, name = _roles(module, shape), str(path[-1]).lower()
    own = module is None or not type(module).__module__.startswith("flax.")
    positions = own and "pos" in name
    table = isinstance(module, nnx.Embed) or (own and "embed" in name and not positions)
    return Projection(
        path=_label(path),
        shape=shape,
        roles=roles,
        convolves=isinstance(module, nnx.Conv | nnx.ConvTranspose),
        table=table,
        positions=positions,
        bias=bias,
    )


def _roles(module: Any, shape: tuple[int, ...]) -> str:
    if isinstance(module, nnx.LinearGeneral):
        return "i" * len(module.in_features) + "o" * len(module.out_features)
    if isinstance(module, nnx.ConvTranspose) and module.transpose_kernel:
        return "oi"
    equation = getattr(module, "einsum_str", None)
    if isinstance(equation, str) and "->" in equation and equation.count(",") == 1:
        operands, out = equation.replace(" ", "").split("->")
        x, w = operands.split(",")
        roles = "".join("-" if c in x and c in out else "i" if c in x else "o" for c in w)
        if w.isalpha() and len(w) == len(shape) and {"i", "o"} <= set(roles):
            return roles
    return "io"


def _label(path: tuple) -> str:
    return "/".join(map(str, path))
