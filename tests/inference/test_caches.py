"""Every kind of cache generates what the whole sequence gives, in less memory where it says so."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import Plan, Precision, Rules
from colossax.errors import InputError
from colossax.inference import Chunk, Generator, Sampling
from colossax.models import MistralConfig
from colossax.nn import (
    MLP,
    Block,
    Decoder,
    DecoderConfig,
    DynamicScaling,
    FlatTokens,
    LatentConfig,
    Layers,
    MixtureConfig,
    QueryGrowth,
    RMSNorm,
    RopeConfig,
    YarnScaling,
    decoder_layer,
    describe,
    every,
    initialise,
)
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference.mixers import GatedRecurrence

WINDOW, CHUNK, SLOTS = 5, 4, 64
KEPT = WINDOW + CHUNK - 1
SIZES = {"vocab": 64, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "max_seq": SLOTS}
MISTRAL = MistralConfig(**SIZES, layers=3, window=WINDOW, init_std=0.3).decoder()
CONFIG = DecoderConfig(**SIZES, layers=3, head_dim=8, rope=RopeConfig(), init_std=0.3)
LATENT = DecoderConfig(
    **{**SIZES, "kv_heads": SIZES["heads"]},
    layers=3,
    head_dim=14,
    rope=RopeConfig(yarn=YarnScaling(factor=4.0, original_max_positions=16), interleaved=True),
    latent=LatentConfig(kv_rank=12, q_rank=16, nope_dim=6, rope_dim=8, v_dim=10),
    init_std=0.3,
)
SINKS = dataclasses.replace(
    CONFIG,
    layers=4,
    window=WINDOW,
    full_layers=every(2, 4),
    sinks=True,
    qkv_bias=True,
    out_bias=True,
    activation="clamped_swiglu",
    mixture=MixtureConfig(experts=4, choices=2, mlp=32, router_bias=True, expert_bias=True),
)
"""As gpt-oss is made."""
CHUNKS = dataclasses.replace(
    CONFIG,
    layers=4,
    rope=RopeConfig(interleaved=True),
    chunk=6,
    full_layers=every(4, 4),
    full_rope=False,
    qk_unit=True,
    query_growth=QueryGrowth(step=4),
    mixture=MixtureConfig(
        experts=4, choices=1, mlp=32, score="sigmoid", renormalise=False, on_input=True, shared=16
    ),
)
"""As Llama 4 is made."""
PROMPT = tuple(np.random.default_rng(0).integers(0, 64, 30).tolist())
ADDED = 24
TOLERANCE = 2e-5
"""Of the largest logit: sums in another order."""


def block(mixer, rngs):
    mlp = MLP(CONFIG.embed, CONFIG.mlp, rngs=rngs, std=0.3)
    return Block({"mixer": mixer, "mlp": mlp}, lambda: RMSNorm(CONFIG.embed))


def recurrent(rngs):
    return block(GatedRecurrence(CONFIG.embed, 24, rngs=rngs), rngs)


KINDS = {
    "local": lambda rngs: decoder_layer(MISTRAL, rngs=rngs),
    "global": lambda rngs: decoder_layer(CONFIG, rngs=rngs),
    "recurrent": recurrent,
}


def alternating(*order):
    return Layers(make={kind: KINDS[kind] for kind in dict.fromkeys(order)}, order=order)


MODELS = {
    "window": (MISTRAL, None),
    "local and global": (CONFIG, alternating("local", "local", "global", "local", "local")),
    "recurrent": (CONFIG, Layers(make=recurrent, order=3)),
    "recurrent and local": (CONFIG, alternating("recurrent", "local", "recurrent", "local")),
    "latent": (LATENT, None),
    "sinks": (SINKS, None),
    "chunks": (CHUNKS, None),
}
LIKE_OTHERS = ("sinks", "chunks")
"""Models that are seldom run: their parts are in others."""
PLANS = {
    "tensor4": Plan(mesh={"tensor": 4}),
    "fsdp2 tensor2": Plan(mesh={"fsdp": 2, "tensor": 2}),
    "2d": Plan(mesh={"row": 2, "col": 2}, tensor_layout="2d"),
    "expert2 tensor2": Plan(mesh={"expert": 2, "tensor": 2}),
    "latent split": Plan(mesh={"tensor": 4}, rules=Rules().updated(cache={"kv_latent": "tensor"})),
}


@functools.cache
def build(name, plan=None):
    """Plan on devices, description and parameters, whose values do not depend on the plan."""
    plan = PLANS[plan] if plan else Plan()
    bound = plan.bind(jax.devices()[: int(np.prod(list(plan.mesh.values()), initial=1))])
    config, layers = MODELS[name]
    with use(bound):
        spec = describe(lambda rngs: Decoder(config, rngs=rngs, layers=layers))
    return bound, spec, initialise(spec, bound, jax.random.key(1))


@functools.cache
def forward(name):
    """Logits of the plain forward pass, `[s, v]`; the slow, obvious truth."""
    _, spec, params = build(name)
    run = jax.jit(lambda params, tokens: spec.merge(params)(tokens)[0])
    return lambda tokens: np.asarray(
        run(params, np.pad(tokens, (0, SLOTS - len(tokens)))[None].astype(np.int32))
    )[: len(tokens)]


@functools.cache
def greedy(name):
    """Each token the likeliest after a full forward pass over all before it."""
    tokens = PROMPT
    for _ in range(ADDED):
        logits = forward(name)(tokens)[-1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-3, "too close to call; choose another seed"
        tokens = (*tokens, int(np.argmax(logits)))
    return tokens[len(PROMPT) :]


def generator(name, plan=None):
    bound, spec, params = build(name, plan)
    return Generator(spec, bound, params, tokens_per_step=CHUNK)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.catches("window-slots")
@pytest.mark.parametrize("name", quick_first(MODELS, [n for n in MODELS if n not in LIKE_OTHERS]))
def test_tokens_are_those_of_repeated_forward_passes(name):
    """Of prompts and continuations many times longer than the window."""
    assert len(PROMPT) > 3 * KEPT and ADDED >= 3 * KEPT
    found = generator(name).generate(PROMPT, max_tokens=ADDED)
    assert found.tokens == greedy(name) and len(set(found.tokens)) > 4


MESHES = [
    (name, plan)
    for name, (config, _) in MODELS.items()
    for plan in PLANS
    if plan not in ("latent split", "2d" if config.mixture else "expert2 tensor2")
]


QUICK = [("window", "tensor4"), ("latent", "tensor4")]


@pytest.mark.catches("cache-dims")
@pytest.mark.parametrize(
    ("name", "plan"),
    quick_first([*MESHES, ("latent", "latent split")], QUICK),
)
def test_a_mesh_does_not_change_the_tokens(name, plan):
    assert generator(name, plan).generate(PROMPT, max_tokens=8).tokens == greedy(name)[:8]


class Seats:
    """Sequences in the seats of one cache, fed in calls of tokens of all of them."""

    def __init__(self, name, seats, *, chunk=CHUNK):
        _, spec, self.params = build(name)
        model = spec.merge(self.params)
        asked = model.cache_spec(seats=seats, slots=SLOTS, chunk=chunk)
        self.cache = jax.tree.map(lambda spec: spec.zeros("float32"), asked)
        self._run = jax.jit(lambda params, *call: self._call(spec.merge(params), *call))

    @staticmethod
    def _call(model, tokens, cache, flat):
        hidden, cache = model.decode(tokens, cache, flat)
        return model.logits(hidden), cache

    def feed(self, tokens):
        """Logits of `(id, seat, position)`, padded to one length."""
        padded = [*tokens, *[(0, -1, 0)] * (3 * CHUNK - len(tokens))]
        ids, seat, position = (jnp.asarray(x, jnp.int32) for x in zip(*padded, strict=True))
        flat = FlatTokens(seat=seat, position=position, slot=position)
        logits, self.cache = self._run(self.params, ids, self.cache, flat)
        return np.asarray(logits)[: len(tokens)]


@pytest.mark.catches("window-turns")
@pytest.mark.catches("window-empty-slots")
@pytest.mark.catches("recurrence-refilled")
@pytest.mark.catches("recurrence-padding")
@pytest.mark.parametrize("name", quick_first(MODELS, ["window", "recurrent"]))
def test_seats_that_are_shared_and_refilled_give_the_logits_of_the_forward_pass(name):
    """Three seats, chunks of any length by turns; a fourth sequence takes the first one's seat."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 64, n) for n in (26, 40, 31, 20)]
    seats, found = Seats(name, 3), [[] for _ in texts]
    while any(len(rows) < len(text) for rows, text in zip(found, texts, strict=True)):
        sitting = [3 if len(found[0]) == len(texts[0]) else 0, 1, 2]
        tokens, whose = [], []
        for seat in rng.permutation(3):
            text, start = texts[sitting[seat]], len(found[sitting[seat]])
            chunk = text[start : start + rng.integers(0, CHUNK + 1)]
            tokens += [(id, seat, start + i) for i, id in enumerate(chunk)]
            whose += [sitting[seat]] * len(chunk)
        for text, row in zip(whose, seats.feed(tokens), strict=True):
            found[text].append(row)
    for text, rows in zip(texts, found, strict=True):
        expected = forward(name)(text)
        assert_close(rows, expected)


@pytest.mark.parametrize("name", quick_first(["window", "local and global"], ["window"]))
def test_fewer_slots_change_no_logits_but_the_order_of_their_sums(name):
    rows = []
    for chunk in (CHUNK, None):
        seats = Seats(name, 1, chunk=chunk)
        calls = [range(at, min(at + CHUNK, 30)) for at in range(0, 30, CHUNK)]
        calls += [[at] for at in range(30, 50)]
        text = (*PROMPT, *greedy(name))
        fed = [seats.feed([(text[i], 0, i) for i in call]) for call in calls]
        rows.append(np.concatenate(fed))
    assert_close(*rows)


def test_tokens_may_be_taken_back():
    """Four drafted tokens are written, two of them replaced: the window is still whole."""
    seats, text = Seats("window", 1), np.asarray([*PROMPT, *greedy("window")])
    expected, at = forward("window")(text), 0
    while at + CHUNK < len(text):
        drafted = np.where(np.arange(CHUNK) < 2, text[at : at + CHUNK], 7)
        rows = seats.feed([(id, 0, at + i) for i, id in enumerate(drafted)])[:2]
        assert_close(rows, expected[at : at + 2])
        at += 2


def cache_of(name, plan=None):
    return generator(name, plan).program.cache


def shapes(cache):
    return jax.tree.map(lambda x: x.shape, cache.empty())


@pytest.mark.catches("window-asked")
def test_a_window_keeps_itself_and_a_chunk():
    """Bytes are those of `window + chunk - 1` slots in layers that have a window."""
    each = 2 * SIZES["kv_heads"] * 8 * 4  # keys and values, float32

    def held(name):
        return sum(x.nbytes for x in jax.tree.leaves(cache_of(name).empty()))

    assert held("window") == 3 * KEPT * each
    assert held("local and global") == (4 * KEPT + 1 * SLOTS) * each
    found = shapes(cache_of("local and global"))
    assert found["local"]["k"] == (4, 1, KEPT, 2, 8) and found["global"]["v"][:3] == (1, 1, SLOTS)


def test_a_window_longer_than_the_sequence_keeps_all_slots():
    _, spec, params = build("window")
    model = spec.merge(params)
    for slots, chunk, kind in ((KEPT, CHUNK, "contiguous"), (KEPT + 1, CHUNK, "windowed")):
        asked = model.cache_spec(seats=1, slots=slots, chunk=chunk)
        assert (asked.kind, asked.arrays["k"].shape[2]) == (kind, KEPT)
    assert model.cache_spec(seats=1, slots=SLOTS).kind == "contiguous"


@pytest.mark.catches("window-width")
def test_more_tokens_than_the_cache_has_room_for_are_refused():
    made, sampling = generator("window"), Sampling(temperature=np.float32(0), seed=np.uint32(0))
    numbers = {"start": np.int32(0), "count": np.int32(CHUNK)}
    chunk = Chunk(ids=np.zeros(2 * CHUNK, np.int32), **numbers)
    with pytest.raises(InputError, match=r"found tokens of shape \(8,\), and this program takes 4"):
        made.program(build("window")[2], made.program.cache.empty(), chunk, sampling)


def test_a_state_is_one_per_seat_in_its_own_precision():
    bound, spec, params = build("recurrent", "fsdp2 tensor2")
    plan = dataclasses.replace(bound.plan, precision=Precision(cache="bfloat16"))
    cache = Generator(spec, plan.bind(list(bound.mesh.devices.flat)), params).program.cache.empty()
    assert cache["state"].shape == (3, 1, 24) and cache["state"].dtype == jnp.float32
    assert {x.data.shape for x in cache["state"].addressable_shards} == {(3, 1, 12)}


@pytest.mark.parametrize(("plan", "each"), [("tensor4", 20), ("latent split", 5)])
def test_a_latent_is_a_contiguous_cache_of_other_arrays_laid_out_as_its_dims_say(plan, each):
    _, spec, params = build("latent", plan)
    asked = spec.merge(params).cache_spec(seats=1, slots=SLOTS, chunk=CHUNK)
    assert asked.kind == "contiguous"
    cache = cache_of("latent", plan).empty()
    assert {name: x.shape for name, x in cache.items()} == {"latent": (3, 1, SLOTS, 12 + 8)}
    assert {x.data.shape[-1] for x in cache["latent"].addressable_shards} == {each}


LENGTHS = dataclasses.replace(
    CONFIG, rope=RopeConfig(dynamic=DynamicScaling(factor=4.0, original_max_positions=4))
)


@pytest.mark.catches("length-of-all-sequences")
def test_each_sequence_has_a_length_of_its_own():
    """A rotary embedding that depends on the length: alone and beside a longer one alike."""
    graphdef, state = nnx.split(Decoder(LENGTHS, rngs=nnx.Rngs(0)))

    def hidden(lengths):
        model = nnx.merge(graphdef, state)
        cache = jax.tree.map(
            lambda one: one.zeros(jnp.float32), model.cache_spec(seats=len(lengths), slots=SLOTS)
        )
        place = jnp.concatenate([jnp.arange(length) for length in lengths])
        seat = jnp.repeat(jnp.arange(len(lengths)), np.asarray(lengths))
        flat = FlatTokens(seat=seat, position=place, slot=place)
        return model.decode(place, cache, flat)[0]

    beside = hidden((8, 20))
    np.testing.assert_allclose(beside[:8], hidden((8,)), atol=1e-5)
    assert np.abs(beside[:8] - beside[8:16]).max() > 1e-2


@pytest.mark.catches("prompt-turned-in-parts")
def test_a_prompt_whose_length_matters_goes_in_one_call():
    spec, bound = describe(lambda rngs: Decoder(LENGTHS, rngs=rngs)), Plan().bind(jax.devices()[:1])
    params = initialise(spec, bound, jax.random.key(0))
    prompt = list(range(10))
    whole, cut = (Generator(spec, bound, params, tokens_per_step=n) for n in (10, 4))
    tokens = whole.generate(prompt, max_tokens=3).tokens
    wider = Generator(spec, bound, params, tokens_per_step=16)
    assert wider.generate(prompt, max_tokens=3).tokens == tokens
    assert len(cut.generate(prompt[:4], max_tokens=3).tokens) == 3
    with pytest.raises(InputError, match="it has 10 tokens, of which a call takes 4, and the"):
        cut.generate(prompt, max_tokens=3)
