"""What a step does with guesses, each part by hand: places, draws, what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.inference.engine.batch import Batch, EngineState, resolved
from colossax.inference.engine.drafting import Guesses
from colossax.inference.engine.drafting.looking import Looked, said_of, with_said
from colossax.inference.engine.drafting.sequential import Candidates
from colossax.inference.engine.drafting.trees import Tree, moved
from colossax.inference.engine.sampling import Chosen, Draws, choose
from colossax.pallas.attention import Pages
from tests.inference.engine.test_drafts import lines_by_hand

SLOTS, VOCAB = 20, 16


def state(parent=None):
    """Two seats that have said 5 and 9 tokens, with three guesses each."""
    said = np.arange(2 * (SLOTS + 1), dtype=np.int32).reshape(2, SLOTS + 1) % VOCAB
    tokens = jnp.asarray([[11, 12, 13], [14, 15, 10]], jnp.int32)
    drafts = Guesses(tokens=tokens, parent=parent and jnp.asarray(parent, jnp.int32))
    length = jnp.asarray([5, 9], jnp.int32)
    return EngineState(cache={}, said=jnp.asarray(said), length=length, drafts=drafts)


def batch(room):
    """The last token of both seats and what is guessed behind, seat 1 first."""
    places = jnp.asarray([-1, -2, -3, -4] * 2, jnp.int32)
    seat = jnp.asarray([1] * 4 + [0] * 4, jnp.int32)
    room = jnp.asarray(room, jnp.int32)
    given = {"ids": places, "position": places, "seat": seat, "room": room}
    return Batch(**given, groups=None, emit=None, scored=None, target=None)


@pytest.mark.catches("guesses-beyond-their-pages")
def test_guesses_stand_behind_what_is_said_where_there_is_room():
    before = state()
    tokens, said = resolved(batch([SLOTS, 11]), before)
    assert tokens.ids.tolist() == [before.said[1, 8], 14, 15, 10, before.said[0, 4], 11, 12, 13]
    assert tokens.position.tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
    assert tokens.slot.tolist() == [8, 9, 10, -1, 4, 5, 6, 7]
    np.testing.assert_array_equal(said, before.said)


@pytest.mark.catches("nodes-are-places")
def test_a_guess_of_a_tree_stands_as_deep_as_it_is_and_lies_by_its_number():
    tokens, _ = resolved(batch([SLOTS, SLOTS]), state([[0, 0, 2], [0, 1, 0]]))
    assert tokens.position.tolist() == [8, 9, 10, 9, 4, 5, 5, 6]
    assert tokens.slot.tolist() == [8, 9, 10, 11, 4, 5, 6, 7]


@pytest.mark.catches("wrong-guesses-are-said")
@pytest.mark.catches("no-token-of-its-own")
def test_what_is_said_is_what_was_right_and_a_token_more():
    path = jnp.asarray([[0, 2, 3], [0, 0, 0], [0, 1, 2]], jnp.int32)
    token = jnp.asarray([[1, 9, 2, 3], [4, 9, 9, 9], [5, 6, 7, 8]], jnp.int32)
    rows = Chosen(
        token=token[:, :3].reshape(-1), logprob=None, top_tokens=None, top_logprobs=None, sound=None
    )
    speaks = jnp.asarray([True, True, False])
    chosen = said_of(rows, jnp.asarray([1, 0, 2]), path[:, :3].clip(0, 2), speaks)
    assert chosen.count.tolist() == [2, 1, 0]
    assert chosen.token[0, :2].tolist() == [1, 2] and chosen.token[1, 0] == 4
    said = with_said(jnp.zeros((3, 8), jnp.int32), chosen.token, chosen.count, jnp.asarray([3] * 3))
    assert said.tolist() == [[0, 0, 0, 1, 2, 0, 0, 0], [0, 0, 0, 4, 0, 0, 0, 0], [0] * 8]


@pytest.mark.catches("penalties-without-guesses")
@pytest.mark.catches("penalties-of-other-branches")
@pytest.mark.parametrize("tree", [False, True])
def test_behind_a_guess_is_drawn_as_if_it_were_said(tree):
    """All that its line has is penalised, and the key is of its position."""
    seats, drafts = 2, 3
    parent = jnp.asarray([[0, 0, 2], [0, 1, 0]], jnp.int32)
    grown = Tree.of(parent) if tree else None
    chain = [[4, 5, 6, 7], [8, 9, 10, 11]]
    position = jnp.asarray([[4, 5, 5, 6], [8, 9, 10, 9]] if tree else chain, jnp.int32)
    ids = jnp.asarray([[7, 0, 1, 2], [7, 1, 0, 2]], jnp.int32)
    there = jnp.ones((seats, 1 + drafts), bool)
    looked = Looked(there=there, ids=ids, position=position, kept=there, tree=grown)
    # The likeliest that was not said is chosen, or one near it.
    logits = jnp.tile(-jnp.arange(VOCAB, dtype=jnp.float32), (seats * (1 + drafts), 1))
    draws = Draws.empty(seats)
    draws.temperature[:], draws.seed[:], draws.begin[:] = (0, 2), (3, 4), (2, 5)
    draws.presence[:], draws.frequency[:] = 50, 1
    draws = jax.tree.map(jnp.asarray, draws)
    said = jnp.full((seats, SLOTS), 9, jnp.int32)
    mask, masked = jnp.full((seats, 1), 0xFFFFFFFF, jnp.uint32), jnp.zeros((), bool)
    given = position.reshape(-1) + 1
    chosen = jax.jit(choose)
    found = chosen(logits, draws, said, given, mask, masked, looked.several()).token
    for seat, parents in enumerate(parent.tolist() if tree else [[0, 1, 2]] * seats):
        for node, line in enumerate(lines_by_hand(parents)):
            start, row = int(position[seat, 0]) + 1, seat * (1 + drafts) + node
            guessed = ids[seat, jnp.asarray(line[1:], jnp.int32)]
            alone = said.at[seat, start : start + len(line) - 1].set(guessed)
            here = jnp.full(seats, int(position[seat, node]) + 1, jnp.int32)
            rows = jnp.broadcast_to(logits[row], (seats, VOCAB))
            assert found[row] == chosen(rows, draws, alone, here, mask, masked).token[seat]


@pytest.mark.catches("last-one-stays-in-the-tree")
@pytest.mark.catches("moved-beyond-their-pages")
def test_what_was_right_lies_at_its_position():
    """Two seats with pages in any order, all else as it was."""
    noise = np.random.default_rng(2)
    held = noise.normal(size=(2, 6, 4, 3)).astype(np.float32)
    table = jnp.asarray([[4, 1, 3], [0, 5, 2]], jnp.int32)
    path = jnp.asarray([[0, 2, 3, 0], [0, 1, 4, 5]], jnp.int32)
    count, begin, room = (jnp.asarray(x, jnp.int32) for x in ([2, 3], [3, 5], [12, 8]))
    want = held.copy()

    def place(seat, slot):
        return int(table[seat, slot // 4]), slot % 4

    for seat, to, source in ((0, 4, 5), (0, 5, 6), (1, 7, 9)):  # slot 8 of seat 1 has no page
        page, at = place(seat, to)
        from_page, from_at = place(seat, source)
        want[:, page, at] = held[:, from_page, from_at]
    given = {"k": jnp.asarray(held), "whole": jnp.asarray(held)}
    pages = Pages(table=table, groups=jnp.zeros((1, 1), jnp.int32))
    found = moved(given, frozenset({"whole"}), pages, path, count, begin, room, 1)
    np.testing.assert_array_equal(found["k"], want)
    np.testing.assert_array_equal(found["whole"], held)


@pytest.mark.catches("leaves-hang-elsewhere")
def test_a_tree_widens_where_it_is_likely_to_be_reached():
    """The line first; then those whose line and own probability are highest together."""
    tokens = jnp.asarray([[[1, 2, 3], [4, 5, 6]]], jnp.int32)
    shares = jnp.asarray([[[0.5, 0.3, 0.2], [0.5, 0.45, 0.01]]])
    found = Candidates(tokens=tokens, logprobs=jnp.log(shares)).guesses(3)
    assert found.tokens.tolist() == [[1, 4, 2, 5, 3]]
    assert found.parent.tolist() == [[0, 1, 0, 1, 0]]
