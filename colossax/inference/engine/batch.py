"""The tokens of a step as arrays, and what they are to the seats that they belong to."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from colossax.inference.cache import Cache
from colossax.inference.engine.drafting.looking import Looked


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Of a step: how many tokens, and in how many groups they attend; see `Pages`."""

    tokens: int
    groups: int
    group: int
    seats: int
    draft: int

    def empty(self) -> "Batch":
        """With nothing but padding, in host memory."""
        return Batch(
            ids=np.zeros(self.tokens, np.int32),
            position=np.zeros(self.tokens, np.int32),
            seat=np.full(self.tokens, -1, np.int32),
            groups=np.full((self.groups, self.group), -1, np.int32),
            emit=np.full((self.seats, 1 + self.draft), -1, np.int32),
            room=np.zeros(self.seats if self.draft else 0, np.int32),
        )

    def unpacked(self, packed: Int[Array, " n"]) -> "Batch":
        """See `Batch.packed`."""
        given, at = {}, 0
        for field in dataclasses.fields(Batch):
            shape = getattr(self.empty(), field.name).shape
            stop = at + math.prod(shape)
            given[field.name], at = packed[at:stop].reshape(shape), stop
        return Batch(**given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of a step, int32.

    Attributes:
        ids: `[t]`; -1: what the seat was given last; -1 - i: what was drafted i places behind it.
        position: `[t]`; -1 - i: i places behind the last token of the seat.
        seat: `[t]`; negative is padding.
        groups: See `Pages`.
        emit: Of each seat which of the tokens is followed by one that it is given, and behind it
            its drafts, `[r, 1 + d]`; negative: none is.
        room: Tokens that each seat's pages hold, `[r]`; empty where nothing is drafted.
    """

    ids: Any
    position: Any
    seat: Any
    groups: Any
    emit: Any
    room: Any

    def packed(self) -> np.ndarray:
        """All of it in one array, which goes to the devices at once."""
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return np.concatenate([part.reshape(-1) for part in parts])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a step gives up and gives back.

    Attributes:
        cache: In pages; see `paged_spec`.
        said: Tokens of each seat by position, `[seats, slots + 1]` int32, read or chosen.
        length: How many of them there are, `[seats]` int32; None where nothing is drafted.
        drafts: Tokens guessed behind them, `[seats, d]` int32; likewise.
        drafter: What the drafter holds; likewise.
    """

    cache: Cache
    said: Any
    length: Any = None
    drafts: Any = None
    drafter: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of a step, as the devices know them, `[t]` int32 each.

    Attributes:
        ids: Theirs.
        position: Theirs.
        slot: Where in the seat each goes; negative: nowhere.
    """

    ids: Any
    position: Any
    slot: Any


def resolved(batch: Batch, state: EngineState) -> tuple[Tokens, Array]:
    """A step's tokens, with those that only the devices know, and `said` with those that are read.

    Args:
        batch: As the host packed it.
        state: Before the step.
    """
    seats = state.said.shape[0]
    valid, own = batch.seat >= 0, jnp.clip(batch.seat, 0)
    position, ids = batch.position, batch.ids
    if state.length is not None:
        behind = jnp.where(position < 0, -1 - position, 0)
        position = jnp.where(position < 0, state.length[own] - 1 + behind, position)
    row = jnp.where(valid, batch.seat, seats)
    known = state.said.at[row, position].get(mode="fill", fill_value=0)
    ids = jnp.where(ids < 0, known, ids)
    if state.length is None:
        said = state.said.at[row, position].set(ids, mode="drop")
        return Tokens(ids=ids, position=position, slot=position), said
    ids = jnp.where(behind > 0, state.drafts[own, jnp.maximum(behind - 1, 0)], ids)
    said = state.said.at[jnp.where(behind > 0, seats, row), position].set(ids, mode="drop")
    slot = jnp.where(position < batch.room[own], position, -1)
    return Tokens(ids=ids, position=position, slot=slot), said


def looked_at(batch: Batch, tokens: Tokens) -> Looked:
    """The tokens of a step behind which others are drawn."""
    at = jnp.clip(batch.emit, 0)
    return Looked(
        there=batch.emit >= 0,
        ids=tokens.ids[at],
        position=tokens.position[at],
        kept=tokens.slot[at] >= 0,
    )
