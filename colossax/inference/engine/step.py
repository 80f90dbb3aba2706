"""What a step computes: tokens into pages, and the next ones of each seat; pure functions."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from colossax.config import RING_AXES, BoundPlan
from colossax.inference.engine.batch import (
    Batch,
    EngineState,
    StepShape,
    Tokens,
    branches_of,
    looked_at,
    resolved,
)
from colossax.inference.engine.drafting import Target, View
from colossax.inference.engine.drafting.looking import accepted, said_of, with_said
from colossax.inference.engine.drafting.trees import moved
from colossax.inference.engine.sampling import Chosen, Draws, choose
from colossax.inference.engine.scoring import Scored, scored
from colossax.nn import FlatTokens, ModelSpec
from colossax.nn.adapters.by_token import seats_turns, turns
from colossax.nn.adapters.several import adapters_in
from colossax.pallas.attention import Heavy, Kept, Pages
from colossax.sharding import use
from colossax.typing import Params

Rings = tuple[tuple[int, int], ...]


def step(
    spec: ModelSpec,
    bound: BoundPlan,
    shape: StepShape,
    rings: Rings,
    params: Params,
    state: EngineState,
    packed: Int[Array, " n"],
    table: Int[Array, "r p"],
    draws: Draws,
    mask: UInt32[Array, "r words"],
    masked: Bool[Array, ""],
    *,
    kept: tuple[str, int] | None = None,
) -> tuple[Chosen, EngineState]:
    """Tokens into their seats' pages, and a token for each seat that emits; pure.

    Args:
        spec, bound, shape: Of the program.
        rings: See `Pages`.
        params: Of the model.
        state: Given up.
        packed: A `Batch`.
        table: Pages of each seat.
        draws: What its request asks.
        mask, masked: See `choose`.
        kept: What requests may keep beside a window, and tokens of a page; None: they keep all.
    """
    batch = shape.unpacked(packed)
    tokens, said = resolved(batch, state)
    of_seats = {} if kept is None else _kept(draws, batch, tokens, *kept)
    pages = Pages(table=table, groups=batch.groups, rings=rings, **of_seats)
    given = batch, tokens, pages, draws
    logits, cache, _, scores = _forward(spec, bound, params, state, given)
    last = batch.emit[:, 0]
    emits = last >= 0
    after = jnp.where(emits, tokens.position[jnp.clip(last, 0)] + 1, said.shape[1])
    with use(bound):
        chosen = choose(logits, draws, said, after, mask, masked)
    rows = jnp.arange(len(emits), dtype=jnp.int32)
    said = said.at[rows, after].set(chosen.token, mode="drop")
    chosen = dataclasses.replace(chosen, scored=scores)
    return chosen, EngineState(cache=cache, said=said)


def looking_step(
    program: Any,
    shape: StepShape,
    kind: str,
    params: Params,
    own: Any,
    state: EngineState,
    packed: Int[Array, " n"],
    table: Int[Array, "r p"],
    draws: Draws,
    mask: UInt32[Array, "r words"],
    masked: Bool[Array, ""],
) -> tuple[Chosen, EngineState]:
    """`step` with guesses: a token for each seat and as many as were right, and new guesses.

    Args:
        program: An `EngineProgram` with a drafter.
        shape, kind: Of the step.
        params: Of the model.
        own: Of the drafter.
        state, packed, table, draws, mask, masked: As of `step`.
    """
    batch, bound, drafter = shape.unpacked(packed), program.bound, program.drafter
    tokens, said = resolved(batch, state)
    pages = Pages(table=table, groups=batch.groups, rings=program.rings)
    seen = dataclasses.replace(pages, branches=branches_of(batch, tokens, state))
    given = batch, tokens, seen, draws
    logits, cache, flat, scores = _forward(program.spec, bound, params, state, given)
    looked, emits = looked_at(batch, tokens), batch.emit[:, 0] >= 0
    position = looked.position.reshape(-1) + 1
    with use(bound):
        chosen = choose(logits, draws, said, position, mask, masked, looked.several())
    right, path = accepted(looked, chosen.token.reshape(looked.ids.shape))
    chosen = dataclasses.replace(said_of(chosen, right, path, emits), scored=scores)
    start = looked.position[:, 0] + 1
    if looked.tree is not None:
        right = jnp.where(emits, right, 0)
        shares = bound.size(RING_AXES)
        cache = moved(cache, program.fixed, pages, path, right, start - 1, batch.room, shares)
    said = with_said(said, chosen.token, chosen.count, start)
    length = jnp.where(emits, start + chosen.count, state.length)
    target, held = Target(params=params, cache=cache), state.drafter
    if kind == "mixed":
        # A drafter has pages of its own, and no rings.
        flat = dataclasses.replace(flat, pages=dataclasses.replace(seen, rings=()))
        held = drafter.read(own, held, target, tokens.ids, flat)
    view = View(
        said=said,
        length=length,
        seen=length - 1,
        speaks=emits,
        room=batch.room,
        table=table,
        draws=draws,
        mask=mask,
        masked=masked,
        target=target,
    )
    drafts, held = drafter.draft(own, held, view)
    return chosen, EngineState(cache=cache, said=said, length=length, drafts=drafts, drafter=held)


def _kept(
    draws: Draws, batch: Batch, tokens: Tokens, keeps: str, page_tokens: int
) -> dict[str, Any]:
    """What `Pages` is told of seats that keep some of their tokens alone."""
    front, window, ring = draws.kept.T
    if keeps == "heavy":
        given = batch.seat, tokens.position, page_tokens
        return {"heavy": Heavy.of(front, window, *given)}
    return {"kept": Kept(sinks=front, window=window, ring=ring, page_tokens=page_tokens)}


def _forward(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    state: EngineState,
    given: tuple[Batch, Tokens, Pages, Draws],
) -> tuple[Array, Any, FlatTokens, Scored | None]:
    """Logits behind the tokens that are followed by others, the cache, and where tokens stand.

    Returns:
        `[r * (1 + d), v]`, what `decode` gave and was called with, and what prompts scored.
    """
    batch, tokens, pages, draws = given
    model: Any = spec.merge(params)
    reads_source = getattr(model.config, "longest_source", None) is not None
    owner = jnp.clip(batch.seat, 0)
    flat = FlatTokens(
        seat=batch.seat,
        position=tokens.position,
        slot=tokens.slot,
        source=draws.source[owner] if reads_source else None,
        pages=pages,
        closer=None if pages.kept is None else pages.kept.closer(batch.seat, tokens.position),
        # A prompt is as long as it is, however it is cut; what is said makes it longer.
        length=jnp.maximum(draws.begin[owner], tokens.position + 1),
    )
    seats, rows = batch.emit.shape
    adapters = adapters_in(spec)
    mine = seats_turns(draws.adapter, adapters) if adapters else None
    of_rows = jnp.repeat(jnp.arange(seats, dtype=jnp.int32), rows)
    with use(bound):
        with turns(mine and mine.of_tokens(owner, batch.seat >= 0)):
            hidden, cache = model.decode(tokens.ids, state.cache, flat)
        with turns(mine and mine.of_tokens(of_rows, batch.emit.reshape(-1) >= 0)):
            logits = model.logits(hidden[jnp.clip(batch.emit, 0).reshape(-1)])

        def logits_of(places: Array) -> Array:
            at = jnp.clip(places, 0)
            with turns(mine and mine.of_tokens(owner[at], places >= 0)):
                return model.logits(hidden[at])

        scores = scored(logits_of, batch.scored, batch.target, batch.emit.size)
    return logits, cache, flat, scores
