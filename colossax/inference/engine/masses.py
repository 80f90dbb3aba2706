"""What an engine counts of its pages where requests keep the tokens that were looked at most."""

from collections.abc import Mapping

from colossax.config import BoundPlan
from colossax.errors import InputError, PlanError
from colossax.inference.cache import Specs
from colossax.nn import CacheArray, CacheSpec
from colossax.pallas.attention.kept import HEAVY, MASS
from colossax.sharding import cache_spec, heads_axes

_KEYS = "k"


def masses_of(arrays: dict[str, CacheArray]) -> dict[str, CacheArray]:
    """Beside keys: the mass and the place of each, see `pallas.attention.HEAVY`.

    Args:
        arrays: Of pages, by name, before they are codes.

    Raises:
        InputError: One of them is read otherwise than by `attend_cache`.

    Cost: 8 bytes for each slot and kv head of a layer.
    """
    for name, one in arrays.items():
        if not one.coded:
            raise InputError(
                f"keeps: found 'heavy', and the model reads what it keeps as '{name}' by itself,"
                " which counts nothing; give first, or leave it out"
            )
    if _KEYS not in arrays:
        return {}
    keys = arrays[_KEYS]
    return {
        name: CacheArray(shape=keys.shape[:-1], dims=keys.dims[:-1], dtype=dtype)
        for name, dtype in zip(HEAVY, ("float32", "int32"), strict=True)
    }


def check_masses(specs: dict[str, CacheSpec]) -> None:
    """Refuse models none of whose layers keep keys in pages.

    Raises:
        InputError: There are none.
    """
    if not any(name in HEAVY for one in specs.values() for name in one.arrays):
        raise InputError(
            "keeps: found 'heavy', and nothing that the model keeps of tokens lies in pages; leave"
            " it out"
        )


def check_split(bound: BoundPlan, specs: Specs, heads: int) -> None:
    """Refuse plans under which no device sees all that look at a key.

    Args:
        bound: Devices of the engine.
        specs: Of its cache.
        heads: Of queries.

    Raises:
        PlanError: Heads are split and kv heads are not.
    """
    for spec in specs.values() if isinstance(specs, Mapping) else (specs,):
        one = spec.arrays.get(MASS)
        if one is None or (axes := heads_axes(bound, heads)) is None:
            continue
        if cache_spec(bound, one.shape, one.dims)[3] is None:
            raise PlanError(
                f"keeps: 'heavy' counts who looks at a key, and '{axes}' splits {heads} heads and"
                f" not the {one.shape[3]} kv heads, so that no device sees all who do; give that"
                " axis a size that divides the kv heads, or ask for keeps first"
            )
