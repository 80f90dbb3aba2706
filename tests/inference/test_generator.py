"""Generation with a cache, against the full forward pass repeated."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.config import BoundPlan, Plan, Segment, preset
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.inference.decode import Chunk, Sampling, decode, sample
from colossax.models import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    maker,
)
from colossax.nn import FlatTokens, describe, initialise
from tests.cases import quick_first
from tests.fresh import fresh_params

SIZES = {"vocab": 128, "embed": 64, "layers": 3, "heads": 8, "max_seq": 64, "init_std": 0.3}
GROUPED = {**SIZES, "kv_heads": 2, "mlp": 96}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "mistral": MistralConfig(**GROUPED, window=5),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gpt2": GPT2Config(**SIZES, mlp=96),
    "opt": OPTConfig(**SIZES, mlp=96),
    "bloom": BloomConfig(**SIZES),
}
LLAMA = CONFIGS["llama"]
PLANS = {
    "fsdp2 tensor4": Plan(mesh={"fsdp": 2, "tensor": 4}),
    "tensor8": Plan(mesh={"tensor": 8}),
    "data2 fsdp4": Plan(mesh={"data": 2, "fsdp": 4}),
    "2d": Plan(mesh={"row": 2, "col": 4}, tensor_layout="2d"),
    "3d": Plan(mesh={"depth": 2, "row": 2, "col": 2}, tensor_layout="3d"),
    "overlap": preset("zero3+megatron_sp", mesh={"fsdp": 2, "tensor": 4}, tensor_matmul="overlap"),
    "sequence split": preset("zero3+megatron_sp", mesh={"fsdp": 2, "tensor": 4}),
    "two segments": Plan(
        mesh={"fsdp": 4, "tensor": 2}, segments=(Segment(count=1), Segment(remat="full"))
    ),
}
PROMPT = tuple(np.random.default_rng(0).integers(0, 128, 21).tolist())


@functools.cache
def build(config, bound: BoundPlan):
    """Model description and parameters whose values do not depend on the plan."""
    with colossax.use(bound):
        spec = describe(maker(config))
    return spec, fresh_params(config, spec, bound, jax.random.key(1))


@functools.cache
def single() -> BoundPlan:
    return Plan().bind(jax.devices()[:1])


@functools.cache
def make(config, **options) -> Generator:
    spec, params = build(config, single())
    return Generator(spec, single(), params, **options)


@functools.cache
def forward(config):
    """Logits of the plain forward pass, `[s, v]`; the slow, obvious truth."""
    spec, params = build(config, single())
    run = jax.jit(lambda params, tokens: spec.merge(params)(tokens)[0])

    def logits(tokens) -> np.ndarray:
        # Later tokens change nothing before them, so one length serves all.
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(params, padded)[: len(tokens)])

    return logits


@functools.cache
def greedy(config, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Each token the likeliest after a full forward pass over all before it."""
    tokens = prompt
    for _ in range(count):
        logits = forward(config)(tokens)[-1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-3, "too close to call; choose another seed"
        tokens = (*tokens, int(np.argmax(logits)))
    return tokens[len(prompt) :]


def decode_logits(config, chunks, *, width: int) -> np.ndarray:
    """Logits of the cached pass, chunk by chunk, each padded to `width`."""
    spec, params = build(config, single())
    model = spec.merge(params)
    cache = model.cache_spec(seats=1, slots=32).zeros("float32")

    @jax.jit
    def run(params, tokens, cache, flat):
        model = spec.merge(params)
        hidden, cache = model.decode(tokens, cache, flat)
        return model.logits(hidden), cache

    rows, start = [], 0
    for chunk in chunks:
        padding = width - len(chunk)
        position = np.pad(np.arange(start, start + len(chunk)), (0, padding)).astype(np.int32)
        seat = np.pad(np.zeros(len(chunk), np.int32), (0, padding), constant_values=-1)
        seat, position = jnp.asarray(seat), jnp.asarray(position)
        flat = FlatTokens(seat=seat, position=position, slot=position)
        tokens = jnp.asarray(np.pad(chunk, (0, padding)).astype(np.int32))
        logits, cache = run(params, tokens, cache, flat)
        rows.append(logits[: len(chunk)])
        start += len(chunk)
    return np.concatenate(rows)


@pytest.mark.sentinel("opt")
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_those_of_the_full_forward_pass(name):
    expected = forward(CONFIGS[name])(PROMPT)
    assert expected.std() > 1
    chunks = [PROMPT[:8], PROMPT[8:9], PROMPT[9:10], PROMPT[10:17], PROMPT[17:]]
    np.testing.assert_allclose(
        decode_logits(CONFIGS[name], chunks, width=8), expected, atol=2e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_repeated_forward_passes(name):
    found = make(CONFIGS[name]).generate(PROMPT, max_tokens=12)
    assert found.tokens == greedy(CONFIGS[name], PROMPT, 12)
    assert found.prompt_tokens == PROMPT and not found.ended


def test_the_window_and_the_prompt_matter():
    """The tests above could pass with a model that ignores them."""
    wide = MistralConfig(**GROUPED, window=None)
    assert greedy(wide, PROMPT, 12) != greedy(CONFIGS["mistral"], PROMPT, 12)
    assert greedy(LLAMA, PROMPT, 6) != greedy(LLAMA, PROMPT[1:], 6)


@pytest.mark.parametrize(
    ("name", "plan"),
    quick_first([("gpt2", "fsdp2 tensor4"), *(("llama", plan) for plan in PLANS)], 2),
)
def test_a_mesh_does_not_change_the_tokens(name, plan, devices):
    bound = PLANS[plan].bind(devices)
    spec, params = build(CONFIGS[name], bound)
    generator = Generator(spec, bound, params)
    expected = greedy(CONFIGS[name], PROMPT, 8)
    assert generator.generate(PROMPT, max_tokens=8).tokens == expected


def test_a_mesh_does_not_change_what_a_seed_draws(devices):
    bound = PLANS["fsdp2 tensor4"].bind(devices)
    spec, params = build(LLAMA, bound)
    drawn = Generator(spec, bound, params).generate(PROMPT, max_tokens=12, temperature=3.0, seed=7)
    alone = make(LLAMA).generate(PROMPT, max_tokens=12, temperature=3.0, seed=7)
    assert drawn.tokens == alone.tokens


@pytest.mark.parametrize(
    ("mesh", "kv_heads"), [({"fsdp": 2, "tensor": 4}, 8), ({"fsdp": 4, "tensor": 2}, 2)]
)
def test_the_cache_is_split_over_kv_heads(mesh, kv_heads, devices):
    config = LlamaConfig(**{**GROUPED, "kv_heads": kv_heads})
    bound = Plan(mesh=mesh).bind(devices)
    spec, params = build(config, bound)
    cache = Generator(spec, bound, params, slots=32).program.cache.empty()
    each = (3, 1, 32, kv_heads // mesh["tensor"], 8)
    assert {shard.data.shape for shard in cache["k"].addressable_shards} == {each}


def test_fewer_kv_heads_than_devices_are_replicated(devices):
    bound = Plan(mesh={"fsdp": 2, "tensor": 4}).bind(devices)
    spec, params = build(LLAMA, bound)
    cache = Generator(spec, bound, params).program.cache.empty()
    assert cache["v"].sharding.is_fully_replicated


def test_one_compilation_serves_every_prompt_temperature_and_seed(monkeypatch):
    generator = make(LLAMA, slots=63)
    traces = count_traces(generator, monkeypatch)
    generator.generate(PROMPT, max_tokens=3)
    assert traces == {"decode": 1}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    jax.jit(lambda x: x * 3)(jnp.ones(7))
    assert compiled, "the listener would not have noticed a compilation"
    compiled.clear()
    generator.generate(PROMPT[:1], max_tokens=20)
    generator.generate(PROMPT[:16], max_tokens=2, temperature=0.5, seed=3)
    generator.generate(PROMPT * 2, max_tokens=1)
    assert not compiled and traces == {"decode": 1}


def count_traces(generator: Generator, monkeypatch) -> collections.Counter:
    """Count how often the model's decode is traced."""
    from colossax.nn import Decoder

    traces = collections.Counter()
    original = Decoder.decode

    def decode(self, *arguments):
        traces["decode"] += 1
        return original(self, *arguments)

    monkeypatch.setattr(Decoder, "decode", decode)
    return traces


@pytest.mark.catches("cache-not-donated")
def test_the_cache_is_donated():
    generator = make(LLAMA)
    cache = generator.program.cache.empty()
    tokens = np.zeros(16, np.int32)
    chunk = Chunk(ids=tokens, start=np.int32(0), count=np.int32(1))
    sampling = Sampling(temperature=np.float32(0), seed=np.uint32(0))
    generator.program(generator._params, cache, chunk, sampling)
    assert cache["k"].is_deleted() and cache["v"].is_deleted()


def test_the_head_runs_on_the_chosen_token_alone():
    spec, params = build(LLAMA, single())
    cache = spec.merge(params).cache_spec(seats=1, slots=32).zeros("float32")
    chunk = Chunk(ids=jnp.zeros(16, jnp.int32), start=jnp.int32(0), count=jnp.int32(1))
    sampling = Sampling(temperature=jnp.float32(0), seed=jnp.uint32(0))
    step = functools.partial(decode, spec, single())
    jaxpr = str(jax.make_jaxpr(step)(params, cache, chunk, sampling))
    assert "f32[1,128]" in jaxpr and "f32[16,128]" not in jaxpr


@pytest.mark.parametrize("width", [1, 4, 32])
def test_how_a_prompt_is_cut_does_not_change_the_draws(width):
    options = {"max_tokens": 10, "temperature": 2.0, "seed": 5}
    expected = make(LLAMA).generate(PROMPT, **options).tokens
    assert make(LLAMA, tokens_per_step=width).generate(PROMPT, **options).tokens == expected


def test_a_draw_depends_on_seed_and_position():
    generator = make(LLAMA)
    draws = {
        generator.generate(PROMPT, max_tokens=8, temperature=5.0, seed=seed).tokens
        for seed in range(4)
    }
    assert len(draws) == 4
    again = generator.generate(PROMPT, max_tokens=8, temperature=5.0, seed=0)
    assert again.tokens in draws
    # Continuing from the middle draws the same: the key is that of the position.
    head, tail = again.tokens[:3], again.tokens[3:]
    rest = generator.generate((*PROMPT, *head), max_tokens=5, temperature=5.0, seed=0)
    assert rest.tokens == tail


@pytest.mark.catches("draw-key")
def test_every_position_draws_with_another_key():
    """At this temperature all tokens are alike: one key for all would draw one token for all."""
    drawn = make(LLAMA).generate(PROMPT, max_tokens=12, temperature=1e6, seed=1).tokens
    assert len(set(drawn)) > 6


@pytest.mark.catches("temperature")
def test_draws_follow_the_softmax():
    logits = jnp.asarray([2.0, 0.0, -1.0, 1.0])
    keys = jax.random.split(jax.random.key(0), 20_000)
    for temperature in (0.5, 2.0):
        drawn = jax.vmap(lambda key, t=temperature: sample(logits, jnp.float32(t), key))(keys)
        found = np.bincount(drawn, minlength=4) / len(keys)
        np.testing.assert_allclose(found, jax.nn.softmax(logits / temperature), atol=0.015)


def test_a_small_temperature_is_nearly_greedy():
    generator = make(LLAMA)
    cold = generator.generate(PROMPT, max_tokens=8, temperature=1e-4, seed=9)
    assert cold.tokens == generator.generate(PROMPT, max_tokens=8).tokens


@pytest.mark.catches("end-of-sequence")
def test_generation_ends_at_the_end_of_sequence_token():
    tokens = make(LLAMA).generate(PROMPT, max_tokens=8).tokens
    found = make(LLAMA, eos=tokens[4]).generate(PROMPT, max_tokens=8)
    end = tokens.index(tokens[4]) + 1
    assert found.tokens == tokens[:end] and found.ended


def test_the_model_names_its_end_of_sequence_token():
    tokens = make(CONFIGS["gpt2"]).generate(PROMPT, max_tokens=8).tokens
    spec = describe(maker(GPT2Config(**SIZES, mlp=96, eos=tokens[0])))
    params = build(CONFIGS["gpt2"], single())[1]
    assert Generator(spec, single(), params).generate(PROMPT, max_tokens=8).tokens == tokens[:1]


@pytest.mark.catches("last-slot")
@pytest.mark.catches("position-in-cache")
def test_the_last_slot_is_used():
    generator = make(LLAMA, slots=24)
    found = generator.generate(PROMPT, max_tokens=3)
    assert found.tokens == greedy(LLAMA, PROMPT, 3)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"prompt: it is empty; give at least one token"),
        ([1, 128], {}, r"token 128 is outside the vocabulary of 128; use ids from 0 to 127"),
        ([-1], {}, r"token -1 is outside the vocabulary"),
        ([1] * 64, {"max_tokens": 1}, r"it has 64 tokens, and at most 63 leave room"),
        (
            [1] * 60,
            {"max_tokens": 5},
            r"a prompt of 60 and 5 more make 65 tokens, above the longest sequence of 64;"
            r" ask for at most 4",
        ),
        ([1], {"max_tokens": 0}, r"max_tokens: found 0; give 1 or more"),
        ([1], {"temperature": -0.5}, r"temperature: found -0.5; give 0 \(greedy\) or more"),
        ([1], {"temperature": float("nan")}, r"temperature: found nan"),
        ([1], {"seed": -1}, r"seed: found -1; give 0 to 4294967295"),
    ],
)
def test_wrong_requests_are_refused(prompt, options, message):
    with pytest.raises(InputError, match=message):
        make(LLAMA).generate(prompt, **options)


def test_wrong_generators_are_refused():
    with pytest.raises(
        InputError, match=r"slots: found 65, but the model's longest sequence is 64"
    ):
        make(LLAMA, slots=65)
    with pytest.raises(InputError, match=r"tokens_per_step: found 0; give 1 or more"):
        make(LLAMA, tokens_per_step=0)


def test_a_model_that_cannot_decode_is_refused_by_name():
    from flax import nnx

    from colossax.nn import param

    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.w = param(jnp.ones((2, 2)), ("embed", "mlp"))

    spec = describe(lambda rngs: Plain(rngs))
    params = initialise(spec, single(), jax.random.key(0))
    with pytest.raises(InputError, match=r"Plain has no 'decode', which generation needs"):
        Generator(spec, single(), params)
