"""The paged cache of an engine: what a model keeps of tokens, in rows that any seat may hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.config import RING_AXES, BoundPlan, Plan
from colossax.inference.cache import Specs
from colossax.inference.engine.formats import check_any, check_format, in_codes
from colossax.inference.plan import inference_plan
from colossax.nn import CacheArray, CacheSpec
from colossax.sharding.attention.cache import PAGES, in_pages

Fixed = frozenset[str] | Mapping[str, frozenset[str]]
"""Names of arrays; of a model with several kinds of layers, by kind."""

_ONLY = ""
"""The kind of layers that are all alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """What the cache of an engine holds.

    Attributes:
        specs: With pages in place of seats, but for what is kept of a seat as a whole.
        fixed: Arrays of what is.
        whole: Whether anything is: then nothing that one seat has computed serves another.
    """

    specs: Specs
    fixed: Fixed
    whole: bool


def paged_spec(
    model: Any, *, seats: int, pages: int, page_tokens: int, slots: int, form: str = "own"
) -> PagedSpec:
    """A model's cache with `pages` rows of `page_tokens` slots.

    What of it does not grow with the length of a sequence (states of recurrences, keys and values
    of a source), or is no token's but all of a sequence's (what images give), has a row for each
    seat, as it has where rows are sequences.

    Args:
        model: With `cache_spec`.
        seats: Sequences at once.
        pages: Rows.
        page_tokens: Slots of each.
        slots: Of a sequence.
        form: What pages are kept in, see `in_codes`; what has a row for each seat is kept as it is.

    Raises:
        InputError: Pages cannot be kept so.
    """
    check_format(form)
    asked = [
        _by_kind(model.cache_spec(seats=rows, slots=of_each))
        for rows, of_each in ((pages, page_tokens), (pages, 2 * page_tokens), (seats, slots))
    ]
    found, fixed_of = {}, {}
    for kind, spec in asked[0].items():
        longer, by_seat = asked[1][kind].arrays, asked[2][kind].arrays
        fixed = {
            name
            for name, one in spec.arrays.items()
            if spec.kind == "sequence" or one.shape == longer[name].shape
        }
        arrays = {n: by_seat[n] for n in spec.arrays if n in fixed}
        paged = {n: _paged(one) for n, one in spec.arrays.items() if n not in fixed}
        arrays |= in_codes(paged, form)
        found[kind] = dataclasses.replace(spec, arrays=arrays)
        fixed_of[kind] = frozenset(fixed)
    check_any(found, form)
    return PagedSpec(
        specs=found.get(_ONLY) or found,
        fixed=fixed_of[_ONLY] if _ONLY in found else fixed_of,
        whole=any(fixed_of.values()),
    )


def _by_kind(specs: Specs) -> dict[str, CacheSpec]:
    return dict(specs) if isinstance(specs, Mapping) else {_ONLY: specs}


def _paged(one: CacheArray) -> CacheArray:
    return dataclasses.replace(one, dims=in_pages(one.dims))


def engine_plan(plan: Plan) -> Plan:
    """`plan` as generation has it, pages shared by the devices of a ring."""
    plan = inference_plan(plan)
    return plan.replace(rules=plan.rules.updated(cache={PAGES: RING_AXES}))


def in_equal_parts(pages: int, bound: BoundPlan) -> int:
    """As many pages, or a few more that nobody gets, so that a ring's devices have as many each."""
    size = bound.size(RING_AXES)
    return -(-pages // size) * size
