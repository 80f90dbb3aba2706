"""Every gate is a loop over tokens in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.sharding import use
from colossax.sharding.experts import (
    Base,
    Capacity,
    DenseToSparse,
    ExpertChoice,
    ExpertWeights,
    GateInput,
    GShard,
    Hash,
    Hierarchical,
    KTop1,
    LinearRouter,
    TopK,
    balance_loss,
    moe,
    moved_bias,
)
from colossax.sharding.experts.balance import entropy, load, z_loss
from colossax.sharding.experts.balanced import auction
from tests.sharding.experts import numpy_gates as truth
from tests.sharding.experts.plans import DIMS, D, Gated, arrays, plan

B, S, E = 3, 12, 8


def logits(seed=0, *, ties=False):
    found = np.random.default_rng(seed).normal(size=(B, S, E)).astype(np.float32) * 2
    return np.round(found) if ties else found


def given(scores, **fields):
    index = np.broadcast_to(np.arange(scores.shape[1]), scores.shape[:2])
    defaults = {"valid": np.ones(scores.shape[:2], bool), "token_index": index}
    fields = {name: jnp.asarray(x) for name, x in {**defaults, **fields}.items() if x is not None}
    return GateInput(logits=jnp.asarray(scores), **fields)


def drawn_by(draw, keys, shape):
    """Each row by its own key."""
    return np.stack([np.asarray(draw(key, shape)) for key in keys])


def as_dicts(routing, experts=E):
    """`{expert: weight}` of each token, without those that are none."""
    expert, weight = np.asarray(routing.expert), np.asarray(routing.weight)
    return [
        [
            {int(e): float(w) for e, w in zip(es, ws, strict=True) if e < experts}
            for es, ws in zip(row, weights, strict=True)
        ]
        for row, weights in zip(expert, weight, strict=True)
    ]


def assert_same(found, wanted):
    for row, row_wanted in zip(found, wanted, strict=True):
        for token, token_wanted in zip(row, row_wanted, strict=True):
            assert set(token) == set(token_wanted)
            for expert, weight in token.items():
                assert weight == pytest.approx(token_wanted[expert], rel=1e-6, abs=2e-6)


def of_tokens(scores, function, **fields):
    return [[function(token.astype(np.float64), **fields) for token in row] for row in scores]


TOPK = {
    "switch": {"k": 1},
    "mixtral": {"k": 2, "renormalise": True},
    "qwen2_moe": {"k": 3},
    "deepseek_v2": {"k": 2, "groups": 4, "kept_groups": 2, "scale": 16.0},
    "sigmoid": {"k": 2, "score": "sigmoid"},
    "deepseek_v3": {
        "k": 3,
        "score": "sigmoid",
        "groups": 4,
        "kept_groups": 2,
        "group_score": "top2",
        "renormalise": True,
        "scale": 2.5,
    },
    "all": {"k": E, "renormalise": True},
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", TOPK)
def test_the_k_best(name, ties):
    scores = logits(ties=ties)
    found = TopK(**TOPK[name])(given(scores))
    assert_same(as_dicts(found), of_tokens(scores, truth.topk, **TOPK[name]))
    np.testing.assert_allclose(np.sum(found.scores, axis=-1), 1, atol=1e-5)


@pytest.mark.catches("bias-in-the-weight")
def test_the_bias_chooses_and_never_weighs():
    scores, bias = logits(), np.linspace(-1, 1, E).astype(np.float32)
    for name in ("deepseek_v3", "mixtral"):
        found = TopK(**TOPK[name])(given(scores, bias=jnp.asarray(bias)))
        assert_same(as_dicts(found), of_tokens(scores, truth.topk, bias=bias, **TOPK[name]))


def test_a_group_without_a_good_expert_counts_zero_and_not_less():
    """Below 0 with their bias, the others are worse than what is not kept: as the peer's code."""
    scores, bias = logits(), np.full(E, -2.0, np.float32)
    found = TopK(**TOPK["deepseek_v3"])(given(scores, bias=jnp.asarray(bias)))
    wanted = of_tokens(scores, truth.topk, bias=bias, **TOPK["deepseek_v3"])
    assert_same(as_dicts(found), wanted)


def test_the_softmax_of_chosen_logits_is_the_renormalised_one():
    scores = logits()
    found = TopK(k=3, renormalise=True)(given(scores))
    assert_same(as_dicts(found), of_tokens(scores, truth.after_softmax, k=3))


def test_prototypes_and_groups():
    scores = logits()
    assert_same(as_dicts(KTop1(k=4)(given(scores))), of_tokens(scores, truth.ktop1, k=4))
    found = Hierarchical(k=2, groups=2)(given(scores))
    assert_same(as_dicts(found), of_tokens(scores, truth.hierarchical, k=2, groups=2))


@pytest.mark.parametrize("key", [None, 3])
def test_gshard_takes_seconds_behind_all_firsts(key):
    scores = logits()
    key = None if key is None else jax.random.split(jax.random.key(key), B)
    noise = np.zeros(scores.shape) if key is None else drawn_by(jax.random.gumbel, key, (S, E))
    wanted, dropped = [], 0
    for row, drawn in zip(scores, np.asarray(noise), strict=True):
        most = int(np.ceil(0.5 * 2 * S / E))
        kept, lost = truth.limited(truth.gshard(row, noise=drawn), most, firsts_first=True)
        wanted.append(kept)
        dropped += lost
    found = GShard(factor=0.5)(given(scores, key=key))
    assert_same(as_dicts(found), wanted)
    assert dropped > 5
    assert found.dropped == dropped


@pytest.mark.catches("later-tokens-first")
@pytest.mark.parametrize("priority", ["position", "probability", "random"])
def test_a_capacity_is_of_a_sequence_and_takes_by_priority(priority):
    scores, key = logits(), jax.random.split(jax.random.key(1), B)
    turned = np.arange(S)[::-1].copy()
    index = np.broadcast_to(turned, (B, S))
    gate = TopK(k=2, renormalise=True, capacity=Capacity(factor=0.6, priority=priority))
    found = gate(given(scores, key=key, token_index=jnp.asarray(index)))
    drawn = drawn_by(jax.random.uniform, key, (S,))[:, turned]
    wanted = []
    for row, numbers in zip(scores, drawn, strict=True):
        choices = [truth.topk(token, k=2, renormalise=True) for token in row]
        order = {
            "position": np.argsort(turned),
            "probability": np.argsort([-max(c.values()) for c in choices], kind="stable"),
            "random": np.argsort(numbers),
        }[priority]
        wanted.append(truth.limited(choices, int(np.ceil(0.6 * 2 * S / E)), order=order)[0])
    assert_same(as_dicts(found), wanted)


@pytest.mark.catches("dropped-while-decoding")
def test_a_capacity_drops_nothing_while_decoding_and_needs_no_key():
    gates = [
        TopK(k=2, capacity=Capacity(factor=0.6, priority=priority))
        for priority in ("position", "random")
    ]
    by_place, without_key = (gate(given(logits())) for gate in gates)
    assert by_place.dropped > 0 and as_dicts(by_place) == as_dicts(without_key)
    one_by_one = dataclasses.replace(given(logits()), decoding=True)
    assert as_dicts(gates[0](one_by_one)) == as_dicts(TopK(k=2)(one_by_one))


def test_hash_is_even_and_fixed():
    vocab = 4 * E
    ids = np.random.default_rng(0).permutation(vocab)[None, : 4 * E]
    scores = np.zeros((1, vocab, E), np.float32)
    routing = Hash(vocab=vocab)(given(scores, token_ids=jnp.asarray(ids)))
    assert np.bincount(np.asarray(routing.expert).ravel()).tolist() == [4] * E
    again = Hash(vocab=vocab)(given(scores[:, ::-1], token_ids=jnp.asarray(ids[:, ::-1])))
    np.testing.assert_array_equal(again.expert[:, ::-1], routing.expert)
    assert np.all(np.asarray(routing.weight) == 1)
    scored = Hash(vocab=vocab, scored=True)(given(scores, token_ids=jnp.asarray(ids)))
    np.testing.assert_allclose(scored.weight, 1 / E)


def test_dense_to_sparse_keeps_what_is_above_its_threshold():
    scores, key = logits(), jax.random.split(jax.random.key(2), B)
    noise = drawn_by(jax.random.gumbel, key, (S, E))
    for drawn, source in ((noise, key), (0 * noise, None)):
        gate = DenseToSparse(threshold=0.15, temperature=1.5)
        found = gate(given(scores, key=source))
        wanted = [
            [
                truth.dense_to_sparse(token, threshold=0.15, temperature=1.5, noise=n)
                for token, n in zip(row, rows, strict=True)
            ]
            for row, rows in zip(scores, drawn, strict=True)
        ]
        assert_same(as_dicts(found), wanted)
    cold = DenseToSparse(threshold=0.4, temperature=0.01)(given(scores))
    assert {len(token) for row in as_dicts(cold) for token in row} == {1}


@pytest.mark.catches("endless-choices")
def test_without_a_threshold_all_experts_are_choices_on_a_mesh():
    x, weights, _, _ = arrays()
    router = LinearRouter(w=jnp.ones((D, E)))
    experts = ExpertWeights(arrays=weights, dims=DIMS, compute=Gated())
    with use(plan({"expert": 8})):
        y, sums = jax.eval_shape(
            lambda x: moe(x, router, experts, gate=DenseToSparse(threshold=0.0)), x
        )
    assert y.shape == x.shape and sums["expert_load"].shape == (E,)


def test_experts_choose_tokens():
    scores = logits()
    found = ExpertChoice(k=2)(given(scores))
    assert_same(as_dicts(found), [truth.expert_choice(row, k=2) for row in scores])


@pytest.mark.catches("chosen-beside-others")
def test_tokens_that_are_written_choose_for_themselves():
    scores = logits()
    found = ExpertChoice(k=2)(dataclasses.replace(given(scores), decoding=True))
    assert found.expert.shape[-1] == 2
    assert_same(as_dicts(found), of_tokens(scores, truth.topk, k=2))


@pytest.mark.catches("auction-of-wide-steps")
def test_an_auction_is_the_best_assignment():
    scores = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    found = np.asarray(Base(tolerance=1e-4)(given(scores)).expert)[..., 0]
    for row, chosen in zip(scores, found, strict=True):
        assert np.bincount(chosen, minlength=3).tolist() == [2, 2, 2]
        value = sum(row[t, e] for t, e in enumerate(chosen))
        assert value >= truth.best_assignment(row) - 6 * 1e-4
    decoding = Base()(dataclasses.replace(given(scores), decoding=True))
    np.testing.assert_array_equal(decoding.expert[..., 0], np.argmax(scores, axis=-1))
    np.testing.assert_allclose(
        decoding.weight[..., 0], truth.sigmoid(np.max(scores, axis=-1)), rtol=1e-5
    )


AUCTION = jax.jit(auction, static_argnums=3)

HARD = {
    "no numbers": np.full((6, 3), np.nan, np.float32),
    "infinite": np.where(np.arange(16) < 8, np.inf, -np.inf) * np.ones((64, 1), np.float32),
    "widest": np.where(np.arange(16) < 8, 3e38, -3e38) * np.ones((64, 1), np.float32),
    "far": np.where(np.arange(16) < 8, 5e4, 0.0) + np.sin(np.arange(64.0))[:, None],
    "equal": np.where(np.arange(16) < 8, 10.0, 0.0) * np.ones((256, 1)),
}


@pytest.mark.catches("bids-without-end")
@pytest.mark.parametrize("name", HARD)
def test_an_auction_ends_and_is_even_on_any_numbers(name):
    scores = jnp.asarray(HARD[name], jnp.float32)
    tokens, experts = scores.shape
    index = jnp.arange(tokens)
    found, rounds = AUCTION(scores, index >= 0, index, 1e-3)
    assert np.bincount(found, minlength=experts).tolist() == [tokens // experts] * experts
    assert rounds < 1024  # by bids, not by what is left to the end


def test_what_bids_left_over_takes_free_places_in_order():
    scores = jnp.asarray(HARD["equal"][:64], jnp.float32)
    index = jnp.arange(64)[::-1]
    valid = index >= 16
    found, rounds = AUCTION(scores, valid, index, 1e-30)
    assert rounds == 1024 and np.bincount(found).tolist() == [3] * 16 + [16]
    in_order = np.asarray(found)[::-1][16:]
    np.testing.assert_array_equal(in_order[in_order >= 8], np.repeat(np.arange(8, 16), 3))


def test_scores_that_spread_far_are_assigned_as_if_they_did_not():
    near = np.random.default_rng(1).normal(size=(1, 12, 4)).astype(np.float32)
    moved = near + np.arange(12, dtype=np.float32)[:, None] * 8
    scores = np.concatenate([near, near * 1e6, moved])
    found = np.asarray(Base(tolerance=1e-5)(given(scores)).expert)[..., 0]
    value = np.sum(np.take_along_axis(near, found[..., None], axis=-1), axis=(1, 2))
    np.testing.assert_allclose(value, value[0], atol=12 * 1e-5)


GATES = [
    *(TopK(**fields) for fields in TOPK.values()),
    TopK(k=2, capacity=Capacity(factor=0.5)),
    KTop1(k=2),
    Hierarchical(k=2, groups=2),
    GShard(),
    Hash(vocab=E),
    DenseToSparse(threshold=0.1),
    DenseToSparse(threshold=0.0),
    DenseToSparse(threshold=0.1, most=3),
    ExpertChoice(k=2),
    Base(),
]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: repr(gate)[:40])
def test_padding_goes_nowhere_and_changes_nothing(gate):
    scores = logits()
    valid = np.broadcast_to(np.arange(S) < S - 4, (B, S))
    other = np.where(valid[..., None], scores, 9.0).astype(np.float32)
    ids = jnp.broadcast_to(jnp.arange(S) % E, (B, S))
    one, two = (
        gate(given(each, valid=jnp.asarray(valid), token_ids=ids)) for each in (scores, other)
    )
    assert all(token == {} for row in as_dicts(one) for token in row[S - 4 :])
    assert as_dicts(one) == as_dicts(two)
    assert one.expert.shape[-1] == gate.width(E) >= min(gate.choices, E)
    short = gate(given(scores[:, : S - 4], token_ids=ids[:, : S - 4]))
    assert_same([row[: S - 4] for row in as_dicts(one)], as_dicts(short))
    taken = sum(len(token) for row in as_dicts(one) for token in row)
    assert float(np.sum(load(one, jnp.asarray(valid), E))) == taken + one.dropped


def test_refusals():
    scores = logits()
    for gate, message in (
        (lambda: TopK(k=9), "9 experts of a token, and there are 8; give at most 8"),
        (lambda: KTop1(k=3), "3 groups do not divide 8 experts"),
        (lambda: Hierarchical(k=5, groups=2), "5 experts of a token, and there are 4"),
        (lambda: Hash(vocab=4), "goes by token ids; give token_ids"),
        (lambda: TopK(k=0), "gate.k: found 0"),
        (lambda: TopK(k=1, score="softmx"), "did you mean 'softmax'"),
        (lambda: TopK(k=1, groups=4), "found 0 of 4 groups"),
        (
            lambda: TopK(k=3, groups=4, kept_groups=1),
            "3 experts of a token, and kept_groups of 1 leaves 2",
        ),
        (lambda: TopK(k=1, groups=8, kept_groups=1, group_score="top2"), "'top2' is of two"),
        (lambda: Base(tolerance=0.0), "gate.tolerance: found 0.0; give a number above 0"),
        (lambda: Hash(vocab=0), "gate.vocab: found 0; give 1 or more"),
        (lambda: Capacity(factor=0.0), "found a factor of 0.0"),
        (lambda: DenseToSparse(threshold=1.0), "gate.threshold"),
    ):
        with pytest.raises(InputError, match=message):
            gate()(given(scores))


def test_balance_losses():
    scores = logits()
    routing = TopK(k=2)(given(scores))
    valid = np.broadcast_to(np.arange(S) < S - 2, (B, S))
    routing_valid = TopK(k=2)(given(scores, valid=jnp.asarray(valid)))
    total, everything, counts = 0.0, [], np.zeros((B, E))
    for b in range(B):
        for t in range(S - 2):
            for expert in truth.topk(scores[b, t].astype(np.float64), k=2):
                counts[b, expert] += 1
        shares = truth.softmax(scores[b, : S - 2].astype(np.float64))
        everything.append(shares.sum(axis=0))
        total += E * np.sum(counts[b] / counts[b].sum() * shares.sum(axis=0))
    found = balance_loss(routing_valid, jnp.asarray(valid), over="sequence")
    assert found == pytest.approx(total, rel=1e-5)
    share = counts.sum(axis=0) / counts.sum()
    batch = E * np.sum(share * np.sum(everything, axis=0))
    found = balance_loss(routing_valid, jnp.asarray(valid), over="microbatch")
    assert found == pytest.approx(batch, rel=1e-5)
    found = balance_loss(
        routing_valid, jnp.asarray(valid), over="global", shares=jnp.asarray(share, jnp.float32)
    )
    assert found == pytest.approx(batch, rel=1e-5)
    even = TopK(k=2)(given(np.zeros((1, S, E), np.float32)))
    assert balance_loss(even, jnp.ones((1, S), bool), over="sequence") == pytest.approx(S)
    wide = scores.astype(np.float64)
    logs = np.log(np.sum(np.exp(wide), axis=-1))
    assert z_loss(jnp.asarray(scores), jnp.asarray(valid)) == pytest.approx(
        np.sum(logs[valid] ** 2), rel=1e-5
    )
    shares = truth.softmax(wide)
    wanted = -np.sum((shares * np.log(shares))[valid])
    assert entropy(routing, jnp.asarray(valid)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.catches("overfull-counted-full")
def test_what_is_dropped_counts_as_load():
    """Else the fullest experts would count as no more than they take."""
    valid, scores = jnp.ones((B, S), bool), logits() + np.eye(E, dtype=np.float32)[0] * 4
    kept, free = (
        TopK(k=2, capacity=capacity)(given(scores)) for capacity in (Capacity(factor=0.5), None)
    )
    assert kept.dropped > 0 and np.sum(np.asarray(kept.expert) == 0) < B * S / 2
    np.testing.assert_array_equal(load(kept, valid, E), load(free, valid, E))
    one, other = (balance_loss(found, valid, over="sequence") for found in (kept, free))
    assert one == other


def test_the_bias_moves_against_the_load():
    bias = moved_bias(jnp.zeros((2, 3)), jnp.asarray([[4.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), 0.5)
    np.testing.assert_array_equal(bias, [[-0.5, 0.5, 0.5], [0, 0, 0]])
