"""The paged cache of an engine: what a model keeps of tokens, in rows that any seat may hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.config import RING_AXES, BoundPlan, Plan
from colossax.errors import InputError
from colossax.inference.cache import Specs
from colossax.inference.engine.formats import check_any, check_format, in_codes
from colossax.inference.engine.masses import check_masses, masses_of
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
        rings: See `Pages`.
    """

    specs: Specs
    fixed: Fixed
    whole: bool
    rings: tuple[tuple[int, int], ...] = ()


def paged_spec(
    model: Any,
    *,
    seats: int,
    pages: int,
    page_tokens: int,
    slots: int,
    form: str = "own",
    ring_tokens: int | None = None,
    heavy: bool = False,
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
        ring_tokens: Most tokens of a seat in one step, where layers that see no further than a
            window keep that alone, in a ring of pages for each seat; None: they keep all pages.
        heavy: Whether what is looked at is counted, see `masses_of`.

    Raises:
        InputError: Pages cannot be kept so, what is looked at cannot be counted, or rings are asked
            for and no layer has use for one.
    """
    check_format(form)
    asked = [
        _by_kind(model.cache_spec(seats=rows, slots=of_each))
        for rows, of_each in ((pages, page_tokens), (pages, 2 * page_tokens), (seats, slots))
    ]
    rings = _rings(model, seats, slots, page_tokens, ring_tokens)
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
        if kind in rings:
            paged = {n: _with_rows(one, seats * rings[kind][1]) for n, one in paged.items()}
        arrays |= in_codes(paged, form)
        if heavy:
            arrays |= masses_of(paged)
        found[kind] = dataclasses.replace(spec, arrays=arrays)
        fixed_of[kind] = frozenset(fixed)
    check_any(found, form)
    if heavy:
        check_masses(found)
    return PagedSpec(
        specs=found.get(_ONLY) or found,
        fixed=fixed_of[_ONLY] if _ONLY in found else fixed_of,
        whole=any(fixed_of.values()) or bool(rings),
        rings=tuple(dict.fromkeys(rings.values())),
    )


def _rings(
    model: Any, seats: int, slots: int, page_tokens: int, most: int | None
) -> dict[str, tuple[int, int]]:
    """By kind of layers: keys that a token sees before it, and the pages of a ring for each seat.

    Raises:
        InputError: There are to be rings, and there are none.
    """
    if most is None:
        return {}
    asked = _by_kind(model.cache_spec(seats=seats, slots=slots, chunk=most))
    found = {}
    for kind, spec in asked.items():
        kept = {one.shape[2] for one in spec.arrays.values() if one.coded}
        pages = -(-max(kept, default=0) // page_tokens)
        if spec.kind == "windowed" and len(kept) == 1 and pages < -(-slots // page_tokens):
            found[kind] = max(kept) - most, pages
    if not found:
        raise InputError(
            f"window_rings: no layer of the model needs less than a sequence of {slots} tokens"
            f" with steps of {most}; leave them out, or give steps of fewer tokens"
        )
    return found


def _with_rows(one: CacheArray, rows: int) -> CacheArray:
    return dataclasses.replace(one, shape=(one.shape[0], rows, *one.shape[2:]))


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


def pages_of(
    model: Any, sizes: Any, bound: BoundPlan, *, form: str = "own", ring_tokens: int | None = None
) -> PagedSpec:
    """`paged_spec` of a model in an engine of these sizes, on these devices.

    Args:
        model: With `cache_spec`.
        sizes: `Sizes` of the engine.
        bound: Its devices, which may share the pages.
        form, ring_tokens: As of `paged_spec`.

    Raises:
        InputError: As `paged_spec`.
    """
    return paged_spec(
        model,
        seats=sizes.seats,
        pages=in_equal_parts(sizes.pages, bound),
        page_tokens=sizes.page_tokens,
        slots=sizes.slots,
        form=form,
        ring_tokens=ring_tokens,
        heavy=sizes.keeps == "heavy",
    )
