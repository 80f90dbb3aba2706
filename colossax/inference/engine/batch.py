"""The tokens of a step as arrays, and what they are to the seats that they belong to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from colossax.inference.cache import Cache
from colossax.inference.engine.drafting.looking import Looked
from colossax.inference.engine.drafting.trees import Tree
from colossax.pallas.attention import Branches

NOWHERE = 2**30
"""A slot behind all that there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Of a step: how many tokens, and in how many groups they attend; see `Pages`.

    `scored` is room for tokens of prompts that are scored, a multiple of the rows of `emit`.
    """

    tokens: int
    groups: int
    group: int
    seats: int
    draft: int
    scored: int = 0

    def empty(self) -> "Batch":
        """With nothing but padding, in host memory."""
        return Batch(
            ids=np.zeros(self.tokens, np.int32),
            position=np.zeros(self.tokens, np.int32),
            seat=np.full(self.tokens, -1, np.int32),
            groups=np.full((self.groups, self.group), -1, np.int32),
            emit=np.full((self.seats, 1 + self.draft), -1, np.int32),
            room=np.zeros(self.seats if self.draft else 0, np.int32),
            scored=np.full(self.scored, -1, np.int32),
            target=np.zeros(self.scored, np.int32),
        )

    def unpacked(self, packed: Int[Array, " n"]) -> "Batch":
        """See `Batch.packed`."""
        given, at = {}, 0
        for name, like in vars(self.empty()).items():
            stop = at + like.size
            given[name], at = packed[at:stop].reshape(like.shape), stop
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
        scored: Which tokens' followers are scored, `[n]`; negative: none's; those stand behind.
        target: The token that follows each, `[n]`.
    """

    ids: Any
    position: Any
    seat: Any
    groups: Any
    emit: Any
    room: Any
    scored: Any
    target: Any

    def packed(self) -> np.ndarray:
        """All of it in one array, which goes to the devices at once."""
        return np.concatenate([part.reshape(-1) for part in vars(self).values()])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a step gives up and gives back.

    Attributes:
        cache: In pages; see `paged_spec`.
        said: Tokens of each seat by position, `[seats, slots + 1]` int32, read or chosen.
        length: How many of them there are, `[seats]` int32; None where nothing is drafted.
        drafts: What is guessed behind them, with as many guesses; likewise.
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
        tree: Of guesses that are one; None: slots are positions.
        node: Which of its tree each is; negative: none.
    """

    ids: Any
    position: Any
    slot: Any
    tree: Tree | None = None
    node: Any = None


def resolved(batch: Batch, state: EngineState) -> tuple[Tokens, Array]:
    """A step's tokens, with those that only the devices know, and `said` with those that are read.

    Args:
        batch: As the host packed it.
        state: Before the step.
    """
    seats = state.said.shape[0]
    row, own = jnp.where(batch.seat >= 0, batch.seat, seats), jnp.clip(batch.seat, 0)
    if state.length is None:
        place = batch.position
        known = state.said.at[row, place].get(mode="fill", fill_value=0)
        ids = jnp.where(batch.ids < 0, known, batch.ids)
        said = state.said.at[row, place].set(ids, mode="drop")
        return Tokens(ids=ids, position=place, slot=place), said
    node = -1 - batch.position
    behind, drafts = jnp.maximum(node, 0), state.drafts
    slot = jnp.where(node >= 0, state.length[own] - 1 + behind, batch.position)
    position, tree = slot, None
    if drafts.parent is not None:
        tree = Tree.of(drafts.parent)
        position = jnp.where(node >= 0, slot - behind + tree.depth[own, behind], slot)
    known = state.said.at[row, position].get(mode="fill", fill_value=0)
    guessed = drafts.tokens[own, jnp.maximum(behind - 1, 0)]
    ids = jnp.where(batch.ids >= 0, batch.ids, jnp.where(behind > 0, guessed, known))
    said = state.said.at[jnp.where(behind > 0, seats, row), position].set(ids, mode="drop")
    slot = jnp.where(slot < batch.room[own], slot, -1)
    return Tokens(ids=ids, position=position, slot=slot, tree=tree, node=node), said


def looked_at(batch: Batch, tokens: Tokens) -> Looked:
    """The tokens of a step behind which others are drawn."""
    at = jnp.clip(batch.emit, 0)
    return Looked(
        there=batch.emit >= 0,
        ids=tokens.ids[at],
        position=tokens.position[at],
        kept=tokens.slot[at] >= 0,
        tree=tokens.tree,
    )


def branches_of(batch: Batch, tokens: Tokens, state: EngineState) -> Branches | None:
    """Who sees whom of guesses that are trees; None where they are not."""
    if tokens.tree is None:
        return None
    first = batch.emit[:, 0]
    # A prompt is no tree, wherever the last one of its seat began.
    is_tree = (first >= 0) & (tokens.node[jnp.clip(first, 0)] == 0)
    begin = jnp.where(is_tree, state.length - 1, NOWHERE)
    return tokens.tree.branches(begin, batch.seat, tokens.node)
