"""What modules hold, and how many dims of it a transform has stacked; nothing is computed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

_NORMS = nnx.LayerNorm | nnx.RMSNorm | nnx.GroupNorm | nnx.BatchNorm | nnx.InstanceNorm

BIASES = ("bias", "b")


def _members(module: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(module, list | tuple):
        members: Iterable[tuple[Any, Any]] = enumerate(module)
    elif isinstance(module, dict):
        members = module.items()
    else:
        members = vars(module).items() if isinstance(module, nnx.Module) else ()
    kinds = nnx.Param | nnx.Module | list | tuple | dict
    return [(name, member) for name, member in members if isinstance(member, kinds)]


def children(module: Any) -> Iterable[tuple[Any, Any]]:
    """Parameters and what may hold such, in the order in which they were given; none of a norm."""
    return () if isinstance(module, _NORMS) else _members(module)


def held_params(
    module: Any, path: tuple = (), above: tuple[int, ...] = ()
) -> Iterator[tuple[Any, tuple, nnx.Param]]:
    """Each parameter within, with the module that holds it and its path."""
    above = (*above, id(module))
    for name, member in _members(module):
        if isinstance(member, nnx.Param):
            yield module, (*path, name), member
        elif id(member) not in above:
            yield from held_params(member, (*path, name), above)


def reference_to_holder(module: Any, path: tuple = (), above: tuple[int, ...] = ()) -> tuple | None:
    """Path of the first member that is one of those that hold it; None: all is a tree."""
    above = (*above, id(module))
    for name, member in _members(module):
        here = (*path, name)
        if id(member) in above or (here := reference_to_holder(member, here, above)):
            return here
    return None


def stacked_dims(module: Any) -> int:
    """How many first dims all parameters within have of layers stacked by a transform."""
    held = list(held_params(module))
    shapes = [tuple(param.shape) for _, _, param in held]
    ranks = [_declared_rank(holder, str(path[-1])) for holder, path, _ in held]
    more = [len(shape) - rank for shape, rank in zip(shapes, ranks, strict=True) if rank]
    depth = min(more) if more else int(_layered(shapes))
    while depth > 0 and len({shape[:depth] for shape in shapes}) > 1:
        depth -= 1
    return max(depth, 0)


def _layered(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether vectors and matrices alike begin with one size that none of them has elsewhere.

    So no width of a block is taken for layers: what a block reads it also writes.
    """
    ranks = {len(shape) for shape in shapes}
    if min(ranks, default=0) != 2 or len(ranks) < 2:
        return False
    first = {shape[0] for shape in shapes}
    return len(first) == 1 and not any(first & set(shape[1:]) for shape in shapes)


def _declared_rank(module: Any, name: str) -> int | None:
    """How many dims a parameter of a known module has where nothing stacks it."""
    if isinstance(module, _NORMS):
        return 1
    if isinstance(module, nnx.Embed) or (isinstance(module, nnx.LoRA) and "lora" in name):
        return 2
    if name == "kernel" and isinstance(module, nnx.Linear):
        return 2
    if name == "kernel" and isinstance(module, nnx.LinearGeneral):
        return sum(len(of) for of in (module.batch_axis, module.in_features, module.out_features))
    if name == "kernel" and isinstance(module, nnx.Conv | nnx.ConvTranspose | nnx.Einsum):
        return len(module.kernel_shape)
    roles = equation_roles(module)
    return len(roles) if roles and name not in BIASES else None


def equation_roles(module: Any) -> str | None:
    """Of the dims that the equation of an einsum gives a parameter."""
    equation = getattr(module, "einsum_str", None)
    if not isinstance(equation, str) or "->" not in equation or equation.count(",") != 1:
        return None
    operands, out = equation.replace(" ", "").split("->")
    x, w = operands.split(",")
    roles = "".join("-" if c in x and c in out else "i" if c in x else "o" for c in w)
    return roles if w.isalpha() and {"i", "o"} <= set(roles) else None


def behind_stack(model: nnx.Module) -> tuple[tuple, ...]:
    """Paths of what was made after the model's first layer stack; Flax sorts names afterwards."""
    layered = (
        path
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param) and "total_layers" in node.get_metadata()
    )
    at, node, behind = (), model, []
    for key in next(layered, ()):
        if key == "segments" or not isinstance(node, nnx.Module):
            break
        names = [name for name in vars(node) if not name.startswith("_")]
        behind += [(*at, name) for name in names[names.index(str(key)) + 1 :]]
        at, node = (*at, key), getattr(node, str(key))
    return tuple(behind)
