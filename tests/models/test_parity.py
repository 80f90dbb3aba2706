"""Every family gives the logits and greedy tokens of `transformers` (tests/golden)."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.models.hf_folder import read_params
from colossax.models.registry import maker
from colossax.nn import Decoder, FlatTokens, describe
from colossax.nn.rope import RopeConfig
from tests.cases import quick_first

GOLDEN = Path(__file__).parent.parent / "golden"
FACTS = json.loads((GOLDEN / "golden.json").read_text())["cases"]
TEXTS = {name: facts for name, facts in FACTS.items() if facts.get("generates", True)}
"""Cases of models that continue texts; test_encoder_parity.py has the others."""
TOLERANCE = 1e-4
LEAST_MOVED = 1e-2

# Per case: what its decoder must not do without, as the fields that switch it off.
OFF = {
    "llama": {
        "rope": {"rope": None},
        "rope theta": {"rope": RopeConfig(theta=300.0)},
        "norm eps": {"norm_eps": 0.1},
    },
    "llama3": {
        "rope scaling": {"rope": RopeConfig(theta=50.0)},
        "linear scaling": {"rope": RopeConfig(theta=50.0, linear_factor=8.0)},
    },
    "llama_head_dim": {
        "attention bias": {"qkv_bias": False, "out_bias": False},
        "output bias": {"out_bias": False},
        "mlp bias": {"mlp_bias": False},
    },
    "mistral": {"window": {"window": None}, "window of one more": {"window": 10}},
    "qwen2": {"qkv bias": {"qkv_bias": False}, "rope theta": {"rope": RopeConfig()}},
    "qwen3": {"qk norm": {"qk_norm": False}},
    "mixtral": {
        "two choices": {"mixture.choices": 1},
        "weights that sum to 1": {"mixture.renormalise": False},
        "rope": {"rope": None},
    },
    "qwen2_moe": {
        "weights as they are": {"mixture.renormalise": True},
        "gate of the shared expert": {"mixture.shared_gated": False},
        "shared expert": {"mixture.shared": 0, "mixture.shared_gated": False},
        "qkv bias": {"qkv_bias": False},
    },
    "qwen3_moe": {
        "two choices": {"mixture.choices": 3},
        "weights that sum to 1": {"mixture.renormalise": False},
        "qk norm": {"qk_norm": False},
    },
    "deepseek_v2_lite": {
        "shared experts": {"mixture.shared": 0},
        "two choices": {"mixture.choices": 2},
        "neighbours turn": {"rope": RopeConfig(theta=10_000.0)},
    },
    "deepseek_v2": {
        "groups": {"mixture.groups": 0},
        "scale of experts": {"mixture.scale": 1.0},
        "magnitude of logits": {"latent.scale": 1.0},
        "rope scaling": {"rope": RopeConfig(theta=50.0, interleaved=True)},
    },
    "deepseek_v3": {
        "bias of the choice": {"mixture.bias_rate": 0.0},
        "groups": {"mixture.groups": 0},
        "weights that sum to 1": {"mixture.renormalise": False},
        "best two of a group": {"mixture.group_score": "max"},
    },
    "olmoe": {
        "two choices": {"mixture.choices": 2},
        "weights as they are": {"mixture.renormalise": True},
        "qk norm": {"qk_norm_whole": False},
    },
    "gpt_oss": {
        "sinks": {"sinks": False},
        "window": {"window": 40},
        "window of one more": {"window": 10},
        "yarn": {"rope": RopeConfig(theta=1000.0)},
        "router bias": {"mixture.router_bias": False},
        "expert bias": {"mixture.expert_bias": False},
        "activation": {"activation": "silu"},
    },
    "llama4_text": {
        "chunk": {"chunk": 64},
        "chunk of one more": {"chunk": 11},
        "layers without rope": {"full_rope": True},
        "query growth": {"query_growth": None},
        "qk norm": {"qk_unit": False},
        "weights on inputs": {"mixture.on_input": False},
        "shared expert": {"mixture.shared": 0},
    },
    "gemma2": {
        "bound of scores": {"score_cap": None},
        "bound of logits": {"logit_cap": None},
        "scale of scores": {"score_scale": None},
        "window of one more": {"window": 10},
        "window": {"window": 40},
        "scale from one": {"norm_from_one": False},
        "scale of embeddings": {"embed_scale": 1.0},
        "norm of outputs": {"norms": "input"},
        "activation": {"activation": "silu"},
    },
    "gemma3": {
        "rope of windows": {"local_rope": None},
        "rope scaling": {"rope": RopeConfig(theta=100.0)},
        "qk norm": {"qk_norm": False},
        "window of one more": {"window": 10},
    },
    "olmo2": {"qk norm": {"qk_norm_whole": False}, "rope": {"rope": None}},
    "smollm3": {"rope": {"rope": None}},
    "starcoder2": {
        "window of one more": {"window": 10},
        "activation": {"activation": "relu"},
        "mlp bias": {"mlp_bias": False},
    },
    "phi3": {
        "window of one more": {"window": 10},
        "part that turns": {"rope": RopeConfig(theta=100.0)},
    },
    "phi3_long": {
        "rope scaling": {"rope": RopeConfig(theta=100.0, dims=4)},
        "magnitude": {"rope.long.magnitude": 1.0},
        "divisors of long rows": {"rope.long.original_max_positions": 64},
    },
    "gpt_neox": {
        "side by side": {"parallel": False},
        "part that turns": {"rope": RopeConfig(theta=100.0)},
        "attention bias": {"qkv_bias": False, "out_bias": False},
    },
    "gpt_neox_in_sequence": {"one after another": {"parallel": True}},
    "gptj": {
        "head bias": {"head_bias": False},
        "neighbours turn": {"rope": RopeConfig(dims=4)},
        "part that turns": {"rope": RopeConfig(interleaved=True)},
        "mlp bias": {"mlp_bias": False},
    },
    "falcon": {"activation": {"activation": "relu"}, "rope": {"rope": None}},
    "falcon_grouped": {"side by side": {"parallel": False}},
    "falcon_alibi": {"alibi": {"alibi": False}, "scale of alibi": {"alibi_scale": 1.0}},
    "cohere": {
        "scale of logits": {"logit_scale": 1.0},
        "qk norm": {"qk_norm_layer": False},
        "neighbours turn": {"rope": RopeConfig(theta=100.0)},
    },
    "glm": {
        "neighbours turn": {"rope": RopeConfig(theta=100.0, dims=8)},
        "qkv bias": {"qkv_bias": False},
    },
    "glm4": {"norm of outputs": {"norms": "input"}},
    "opt_350m": {"positions": {"learned_positions": 0}},
    "qwen2_window": {
        "window": {"window": 40},
        "window of one more": {"window": 10},
        "rope scaling": {"rope": RopeConfig(theta=50.0)},
    },
    "llama_linear": {"rope scaling": {"rope": RopeConfig(theta=100.0)}},
    "llama_dynamic": {"rope scaling": {"rope": RopeConfig(theta=100.0)}},
    "mistral_nemo": {"rope scaling": {"rope": RopeConfig(theta=50.0)}},
    "gpt2": {
        "positions": {"learned_positions": 0},
        "attention bias": {"qkv_bias": False, "out_bias": False},
        "activation": {"activation": "relu"},
    },
    "opt": {
        "position offset": {"position_offset": 0},
        "positions": {"learned_positions": 0},
        "activation": {"activation": "gelu"},
    },
    "bloom": {
        "alibi": {"alibi": False},
        "embedding norm": {"embed_norm": False},
        "mlp bias": {"mlp_bias": False},
    },
}

DEAR = (
    "deepseek_v2",
    "olmo2",
    "phi3",
    "gpt_neox_in_sequence",
    "falcon",
    "falcon_alibi",
    "glm4",
    "qwen2_window",
    "llama_linear",
    "mistral_nemo",
    *("olmoe", "qwen3_moe", "qwen2_moe", "smollm3", "starcoder2"),
)
"""Cases of which the core has another one's features."""

CACHED = ["gpt2", "llama", "bloom", "gemma3", "gpt_neox", "deepseek_v3", "llama4_text", "gpt_oss"]
"""Those that the core generates with keys and values kept: every kind of cache and position."""


def expected(case):
    """Tokens and logits as `transformers` gave them."""
    return load_file(GOLDEN / case / "expected.safetensors")


def logits(make_model, params, tokens):
    """Logits of a model made anew around the parameters it has a place for."""
    spec = describe(make_model)
    return np.asarray(jax.jit(lambda p, t: spec.merge(p)(t))(kept(params, spec.infos), tokens))


def kept(params, infos):
    """The parameters that `infos` names."""
    if not isinstance(infos, dict):
        return params
    return {name: kept(params[name], branch) for name, branch in infos.items()}


def test_every_case_is_here():
    assert set(TEXTS) == set(OFF)
    assert set(FACTS) == {path.parent.name for path in GOLDEN.glob("*/config.json")}


@pytest.mark.catches("one-rope-for-all")
@pytest.mark.catches("logits-without-bound")
@pytest.mark.catches("latent-softmax-scale")
@pytest.mark.catches("chunks-forgotten")
@pytest.mark.catches("expert-bias-unweighed")
@pytest.mark.catches("interleaved-rope")
@pytest.mark.catches("stretches-alike")
@pytest.mark.catches("bloom-heads-side-by-side")
@pytest.mark.catches("llama-heads-inside-out")
@pytest.mark.parametrize("case", quick_first(TEXTS, [name for name in TEXTS if name not in DEAR]))
def test_logits_and_greedy_tokens(case):
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    if not FACTS[case].get("plain", True):  # generated tokens are of other lengths than the text
        found = logits(maker(config), params, want["input_ids"])
        np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE)
        return
    # The greedy text given up to each of its tokens, every token must be the best one.
    text = np.concatenate([want["prompt"], want["greedy"]])[None, :-1]
    ids = np.zeros((3, text.shape[1]), np.int32)
    ids[:2, : want["input_ids"].shape[1]] = want["input_ids"]
    ids[2:] = text
    found = logits(maker(config), params, ids)
    got = found[:2, : want["input_ids"].shape[1]]
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=TOLERANCE)
    greedy = found[2, len(want["prompt"]) - 1 :].argmax(-1)
    assert greedy.tolist() == want["greedy"].tolist()
    assert len(greedy) == 32


@pytest.mark.slow
@pytest.mark.catches("latent-values")
@pytest.mark.parametrize("case", quick_first(TEXTS, CACHED))
def test_greedy_tokens_with_a_cache(case):
    """The prompt, then one token at a time, keys and values kept: the same logits and tokens."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    text = np.concatenate([want["prompt"], want["greedy"]])[:-1]
    prompt = len(want["prompt"])
    found = decoded(describe(maker(config)), params, text, prompt)
    if FACTS[case].get("plain", True):
        given = want["logits"][0, :prompt]
        np.testing.assert_allclose(found[:prompt], given, rtol=0, atol=TOLERANCE)
    assert found[prompt - 1 :].argmax(-1).tolist() == want["greedy"].tolist()


def decoded(spec, params, text, prompt):
    """Logits after each token of a text of which so many come at once, the others one by one."""

    def run(params, text):
        model = spec.merge(params)
        specs = model.cache_spec(seats=1, slots=len(text))  # several, where layers are
        cache = jax.tree.map(lambda spec: spec.zeros(jnp.float32), specs)

        def feed(cache, places):
            flat = FlatTokens(seat=jnp.zeros_like(places), position=places, slot=places)
            hidden, cache = model.decode(text[places], cache, flat)
            return cache, model.logits(hidden)

        places = jnp.arange(len(text), dtype=jnp.int32)
        cache, first = feed(cache, places[:prompt])
        rest = jax.lax.scan(feed, cache, places[prompt:, None])[1]
        return jnp.concatenate([first, rest[:, 0]])

    return np.asarray(jax.jit(run)(params, text))


def switched_off(decoder, fields):
    """With these fields; those of its parts begin with the part's name."""
    outer = {name: v for name, v in fields.items() if "." not in name}
    for part in {name.partition(".")[0] for name in fields if "." in name}:
        inner = {
            name.removeprefix(f"{part}."): v
            for name, v in fields.items()
            if name.startswith(f"{part}.")
        }
        outer[part] = switched_off(getattr(decoder, part), inner)
    return dataclasses.replace(decoder, **outer)


OFFS = [(case, off) for case in OFF for off in OFF[case]]
SLOW = (
    *("olmoe", "gpt_oss", "llama4_text", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3"),
    *("gemma2", "gemma3", "phi3_long", "gptj", "cohere", "starcoder2", "gpt_neox", "glm"),
    *DEAR,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "off"), quick_first(OFFS, [one for one in OFFS if one[0] not in SLOW][::2])
)
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    decoder = switched_off(config.decoder(), OFF[case][off])
    want = expected(case)
    got = logits(lambda rngs: Decoder(decoder, rngs=rngs), params, want["input_ids"])
    assert np.abs(got - want["logits"]).max() > LEAST_MOVED


def test_grouped_queries_share_the_right_head():
    config, params = read_params(GOLDEN / "llama")
    want = expected("llama")
    attn = params["layers"]["segments"][0]["attn"]
    for name in "kv":
        attn[name]["w"] = np.roll(attn[name]["w"], 1, axis=2)
    got = logits(maker(config), params, want["input_ids"])
    assert np.abs(got - want["logits"]).max() > LEAST_MOVED


def test_golden_models_can_tell_right_from_wrong():
    for facts in FACTS.values():
        assert facts["logits_std"] >= 1
        by = {name: moved for name, moved in facts["moved"].items() if name != "gelu by tanh"}
        assert min(by.values()) > LEAST_MOVED
        assert facts["rounding"] < TOLERANCE / 10
