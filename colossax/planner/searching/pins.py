"""What people pin, forbid and allow, read."""

from collections.abc import Iterable, Mapping

from colossax.config import MESH_AXES, nearest
from colossax.errors import InputError
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.meshes import AXES

_SEARCHED = tuple(axis.value for axis in AXES)

STATE = "state"

LEAVES: Mapping[str, tuple[str, ...]] = {
    STATE: ("mixed", "bfloat16", "8bit"),
    "reduction": ("bfloat16",),
    "accumulation": ("bfloat16",),
}
"""What may be allowed: the optimizer's moments, gradients as devices sum them, and as they are
summed over microbatches."""


def asked_of(pins: Iterable[str], forbidden: Iterable[str], allow: Iterable[str] = ()) -> Asked:
    """What `--pin`, `--forbid` and `--allow` ask for.

    Args:
        pins: `tensor=4`, the size of a mesh axis; or `embed=fsdp`, `embed=fsdp+data`, the axes over
            which parameters' dim is split.
        forbidden: Mesh axes.
        allow: `state=bfloat16`; see `leaves_of`.

    Raises:
        InputError: They name no axis that is searched, or contradict one another.
    """
    sizes: dict[str, int] = {}
    dims: dict[str, tuple[str, ...]] = {}
    for text in pins:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--pin: found '{text}'; write it NAME=VALUE, as tensor=4")
        if name in sizes or name in dims:
            raise InputError(f"--pin {name}: is given twice; give it once")
        if name in MESH_AXES or value.isdecimal():
            check_axis(name, "--pin")
            if not value.isdecimal() or int(value) < 1:
                raise InputError(f"--pin {name}: found '{value}'; give its size, 1 or more")
            sizes[name] = int(value)
        else:
            axes = tuple(value.split("+"))
            for axis in axes:
                check_axis(axis, f"--pin {name}")
            dims[name] = axes
    left_out = frozenset(forbidden)
    for axis in sorted(left_out):
        check_axis(axis, "--forbid")
        _check_apart(axis, sizes, dims)
    return Asked(sizes=sizes, forbidden=left_out, dims=dims, allowed=leaves_of(allow))


def _check_apart(axis: str, sizes: dict[str, int], dims: dict[str, tuple[str, ...]]) -> None:
    """Refuse an axis that is left out and pinned."""
    pins = [f"{axis}={sizes[axis]}"] if sizes.get(axis, 1) > 1 else []
    pins += [f"{dim}={'+'.join(axes)}" for dim, axes in dims.items() if axis in axes]
    if pins:
        raise InputError(f"--pin {pins[0]} and --forbid {axis} contradict; leave one of them out")


def check_axis(axis: str, where: str) -> None:
    """Refuse what is no mesh axis that is searched.

    Raises:
        InputError: It is not, with those that are.
    """
    if axis not in _SEARCHED:
        raise InputError(
            f"{where}: '{axis}' is no mesh axis that is searched{nearest(axis, _SEARCHED)}"
        )


def leaves_of(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What `--allow` says: `state=bfloat16`, several divided by commas or given one by one.

    Raises:
        InputError: It names no setting or value that can be allowed.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in (part for given in texts for part in given.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--allow: found '{text}'; write it NAME=VALUE, as state=bfloat16")
        if name not in LEAVES:
            raise InputError(
                f"--allow: '{name}' is nothing that can be allowed{nearest(name, LEAVES)}"
            )
        if value not in LEAVES[name]:
            raise InputError(f"--allow {name}: found '{value}'; give {' or '.join(LEAVES[name])}")
        found[name] = (*found.get(name, ()), value)
    return found
