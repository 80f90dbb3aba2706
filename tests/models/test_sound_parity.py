"""Models of sound give the logits and greedy tokens of `transformers` (tests/golden)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.models import registry
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import EncoderDecoder, FlatTokens, describe
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

CASES = [name for name, facts in FACTS.items() if facts.get("sound")]

# Per case: what its encoder or decoder must not do without, as the fields that switch it off.
OFF = {
    "whisper": {
        "sines": ("encoder", {"learned_positions": 0, "sinusoids": False}),
        "positions": ("decoder", {"learned_positions": 0}),
        "norm of the source": ("encoder", {"final_norm": False}),
        "last norm": ("decoder", {"final_norm": False}),
        "attention bias": ("encoder", {"qkv_bias": False}),
        "output bias": ("decoder", {"out_bias": False}),
        "mlp bias": ("decoder", {"mlp_bias": False}),
        "activation": ("encoder", {"activation": "relu"}),
    }
}


def frames_of(want):
    """Sound as ours lies, the numbers of a frame last."""
    return np.ascontiguousarray(want["input_features"].transpose(0, 2, 1))


def told(make_model, params, want):
    """Logits of a model made anew around the parameters it has a place for."""
    spec = describe(make_model)
    run = jax.jit(lambda params, tokens, frames: spec.merge(params)(tokens, frames=frames))
    return np.asarray(run(kept(params, spec.infos), want["decoder_input_ids"], frames_of(want)))


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("frames-behind-unseen")
@pytest.mark.catches("second-of-a-pair-first")
@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    found = told(registry.maker(config), params, want)
    np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_with_a_cache(case):
    """Sound read once, then one token at a time."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    greedy, frames = want["greedy"], frames_of(want)[:1]
    spec = describe(registry.maker(config))
    text = np.concatenate([[config.start], greedy[:-1]]).astype(np.int32)

    def run(params):
        model, count = spec.merge(params), jnp.array([frames.shape[1] // 2])
        cache = model.cache_spec(seats=1, slots=len(text)).zeros(jnp.float32)
        cache = model.read(None, count, cache, jnp.array([0]), jnp.asarray(frames))

        def feed(cache, at):
            where = jnp.reshape(at, (1,))
            flat = FlatTokens(seat=jnp.zeros_like(where), position=where, slot=where, source=count)
            hidden, cache = model.decode(jnp.asarray(text)[where], cache, flat)
            return cache, model.logits(hidden)[0]

        return jax.lax.scan(feed, cache, jnp.arange(len(text), dtype=jnp.int32))[1]

    found = np.asarray(jax.jit(run)(params))
    assert found.argmax(-1).tolist() == greedy.tolist()
    assert len(greedy) == 32


@pytest.mark.catches("sound-of-half-a-length")
def test_generator_reads_sound_first():
    """The same tokens from a generator, of a mesh too; and what it refuses."""
    config, params = read_params(GOLDEN / "whisper")
    want = expected("whisper")
    bound = Plan(mesh={"tensor": 2}).bind(jax.devices()[:2])
    with use(bound):
        spec = describe(registry.maker(config))
    laid = jax.tree.map(
        lambda info, x: jax.device_put(x, param_sharding(bound, "params", info)), spec.infos, params
    )
    generator = Generator(spec, bound, laid, slots=40, eos=-1)
    frames = frames_of(want)[0]
    found = generator.generate([config.start], frames=frames, max_tokens=32)
    assert found.tokens == tuple(want["greedy"].tolist())
    for given, message in (
        ({}, "frames: the model's encoder reads sound; give it"),
        ({"frames": frames, "source": [1]}, "source: the model's encoder reads sound, not tokens"),
        ({"frames": frames[:7]}, r"frames: found shape \[7, 10\], and the model reads an even"),
        ({"frames": frames[:, :4]}, r"frames: found shape \[48, 4\]"),
        ({"frames": np.zeros((50, 10))}, r"frames: found shape \[50, 10\].*, 48 or fewer"),
    ):
        with pytest.raises(InputError, match=message):
            generator.generate([config.start], max_tokens=4, **given)


def test_sound_is_refused_where_none_is_read():
    config, params = read_params(GOLDEN / "t5")
    bound = Plan().bind(jax.devices()[:1])
    generator = Generator(describe(registry.maker(config)), bound, params, slots=8)
    with pytest.raises(InputError, match="frames: the model has no encoder that reads sound"):
        generator.generate([0], source=[1], frames=np.zeros((4, 80)), max_tokens=4)


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


@pytest.mark.parametrize("case", CASES)
def test_files_are_written_as_they_were_read(case, tmp_path):
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", GOLDEN / case)
    )
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert all(mine[name].shape == theirs[name].shape for name in mine)
    config = read_params(GOLDEN / case)[0]
    again = registry.config_from_json(registry.config_to_json(config))
    assert read_params(tmp_path / "export")[0] == config == again
    said, asked = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "export", GOLDEN / case)
    )
    same = ("architectures", "num_mel_bins", "max_source_positions", "decoder_ffn_dim")
    assert [said[name] for name in same] == [asked[name] for name in same]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embedding": True}, "whisper with scale_embedding = True is not supported"),
        ({"apply_spec_augment": True}, "whisper with apply_spec_augment = True is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"activation_function": "mish"}, "activation_function = 'mish' is not supported"),
        ({"encoder_attention_heads": 5}, "5 heads do not divide embed 32"),
        ({"d_model": 36, "encoder_attention_heads": 5}, "5 heads do not divide embed 36"),
        ({"num_mel_bins": 0}, "'num_mel_bins': found 0; give 1 or more"),
        ({"decoder_start_token_id": 128}, "start: found 128, which is none of the vocab"),
        (
            {"architectures": ["WhisperForAudioClassification"]},
            r"whisper with architectures = \['WhisperForAudioClassification'\] is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    given = settings("whisper", **changes)
    with pytest.raises(InputError, match=message):
        CONVERSIONS["whisper"].config_from(given)
