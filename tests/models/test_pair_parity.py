"""Encoder-decoders give the logits and greedy tokens of `transformers` (tests/golden)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.inference.stages import why_gathered
from colossax.models import registry
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import EncoderDecoder, FlatTokens, RelativeConfig, describe
from colossax.sharding import param_sharding, use
from tests.cases import quick_first
from tests.models.test_encoder_parity import settings
from tests.models.test_parity import (
    FACTS,
    GOLDEN,
    LEAST_MOVED,
    TOLERANCE,
    expected,
    kept,
    switched_off,
)

CASES = [name for name, facts in FACTS.items() if facts.get("pair")]

# Per case: what its encoder or decoder must not do without, as the fields that switch it off.
OFF = {
    "t5": {
        "distances": ("encoder", {"relative": None}),
        "distances of the decoder": ("decoder", {"relative": None}),
        "farthest": ("encoder", {"relative": RelativeConfig(buckets=8, farthest=12)}),
        "scores as they are": ("decoder", {"score_scale": None}),
        "scale of logits": ("decoder", {"logit_scale": 1.0}),
        "norm of the source": ("encoder", {"final_norm": False}),
        "activation": ("encoder", {"activation": "gelu"}),
    },
    "t5_gated": {
        "own head": ("decoder", {"tied": True}),
        "activation": ("decoder", {"activation": "relu"}),
    },
    "bart": {
        "positions": ("encoder", {"learned_positions": 0}),
        "position offset": ("decoder", {"position_offset": 1}),
        "norm of embeddings": ("encoder", {"embed_norm": False}),
        "scale of embeddings": ("encoder", {"embed_scale": 1.0}),
        "head bias": ("decoder", {"head_bias": False}),
    },
}


def told(make_model, params, want):
    """Logits of a model made anew around the parameters it has a place for."""
    spec = describe(make_model)
    given = {
        "source": want["input_ids"],
        "source_segments": np.where(want["attention_mask"], 0, -1).astype(np.int32),
    }
    run = jax.jit(lambda params, tokens, given: spec.merge(params)(tokens, **given))
    return np.asarray(run(kept(params, spec.infos), want["decoder_input_ids"], given))


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("keys-behind-as-before")
@pytest.mark.catches("source-padding-seen")
@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    """Of two sources, of which one ends in padding."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    found = told(registry.maker(config), params, want)
    np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.catches("source-read-by-one-layer")
@pytest.mark.catches("cached-distances-from-zero")
@pytest.mark.parametrize("case", quick_first(CASES, CASES[:1]))
def test_greedy_tokens_with_a_cache(case):
    """A source read once into a cache that is longer, then one token at a time."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    greedy, source = want["greedy"], want["prompt"]
    spec = describe(registry.maker(config))
    text = np.concatenate([[config.start], greedy[:-1]]).astype(np.int32)

    def run(params):
        model, count = spec.merge(params), jnp.array([len(source)])
        cache = model.cache_spec(seats=1, slots=len(text)).zeros(jnp.float32)
        padded = jnp.pad(jnp.asarray(source), (0, 6), constant_values=3)[None]
        cache = model.read(padded, count, cache, jnp.array([0]))

        def feed(cache, at):
            where = jnp.reshape(at, (1,))
            flat = FlatTokens(seat=jnp.zeros_like(where), position=where, slot=where, source=count)
            hidden, cache = model.decode(jnp.asarray(text)[where], cache, flat)
            return cache, model.logits(hidden)[0]

        return jax.lax.scan(feed, cache, jnp.arange(len(text), dtype=jnp.int32))[1]

    found = np.asarray(jax.jit(run)(params))
    assert found.argmax(-1).tolist() == greedy.tolist()
    assert len(greedy) == 32


def test_generator_reads_a_source_first():
    """The same tokens from a generator, of a mesh too; and sources of their own for each."""
    config, params = read_params(GOLDEN / "t5")
    want = expected("t5")
    bound = Plan(mesh={"tensor": 2}).bind(jax.devices()[:2])
    with use(bound):
        spec = describe(registry.maker(config))
    laid = jax.tree.map(
        lambda info, x: jax.device_put(x, param_sharding(bound, "params", info)), spec.infos, params
    )
    generator = Generator(spec, bound, laid, slots=40, eos=-1)
    given = {"source": want["prompt"].tolist(), "max_tokens": 32}
    assert generator.generate([config.start], **given).tokens == tuple(want["greedy"].tolist())
    with pytest.raises(InputError, match="source: it is empty, and the model's encoder reads one"):
        generator.generate([0], max_tokens=4)
    with pytest.raises(InputError, match="source: it has 97 tokens, above the 96 of the model"):
        generator.generate([0], source=[2] * 97, max_tokens=4)


def test_stages_gather_its_layers():
    bound = Plan(mesh={"stage": 2}).bind(jax.devices()[:2])
    with use(bound):
        spec = describe(registry.maker(read_params(GOLDEN / "t5")[0]))
    assert "the model's encoder reads a source first, so every device" in why_gathered(spec, bound)


OFFS = [(case, off) for case in OFF for off in OFF[case]]


@pytest.mark.parametrize(("case", "off"), quick_first(OFFS, OFFS[:2]))
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    which, fields = OFF[case][off]
    stacks = {"encoder": config.encoder(), "decoder": config.decoder()}
    stacks[which] = switched_off(stacks[which], fields)
    want = expected(case)

    def make(rngs):
        return EncoderDecoder(stacks["encoder"], stacks["decoder"], rngs=rngs)

    assert np.abs(told(make, params, want) - want["logits"]).max() > LEAST_MOVED


@pytest.mark.parametrize("case", quick_first(CASES, CASES[2:]))
def test_files_are_written_as_they_were_read(case, tmp_path):
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", GOLDEN / case)
    )
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    config = read_params(GOLDEN / case)[0]
    again = registry.config_from_json(registry.config_to_json(config))
    assert read_params(tmp_path / "export")[0] == config == again


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("t5", {"is_decoder": True}, "t5 with is_decoder = True is not supported"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'mish' is not supported"),
        (
            "t5",
            {"relative_attention_num_buckets": 6},
            "6 buckets for 2 sides and distances up to 20 found; give a multiple of 4",
        ),
        ("t5", {"decoder_start_token_id": 128}, "start: found 128, which is none of the vocab"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ("bart", {"encoder_attention_heads": 5}, "5 heads do not divide embed 32"),
        (
            "t5",
            {"architectures": ["T5ForSequenceClassification"]},
            r"t5 with architectures = \['T5ForSequenceClassification'\] is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, changes, message):
    given = settings(case, **changes)
    with pytest.raises(InputError, match=message):
        CONVERSIONS[given["model_type"]].config_from(given)
