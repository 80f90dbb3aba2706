"""Two encoders, of texts and of images, give the scores of `transformers` (tests/golden)."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from colossax.errors import InputError
from colossax.models import CLIPConfig, SigLIPConfig, registry
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import conversion_of, read_params
from colossax.nn import DualEncoder, EncoderPart, HeadConfig, describe
from tests.cases import quick_first
from tests.models.test_encoder_parity import settings
from tests.models.test_parity import FACTS, GOLDEN, LEAST_MOVED, expected, kept, switched_off

CASES = [name for name, facts in FACTS.items() if facts.get("both")]
TOLERANCE = 1e-5

# Per case: what an encoder must not do without, as the fields that switch it off.
OFF = {
    "clip": {
        "causal": ("text", {"causal": False}),
        "positions of texts": ("text", {"learned_positions": 0}),
        "quick gelu of texts": ("text", {"activation": "gelu"}),
        "quick gelu of images": ("image", {"activation": "gelu"}),
        "first token that ends": ("text", {"head.pool": "first"}),
        "the token that ends": ("text", {"eos": None}),
        "norm of embeddings": ("image", {"embed_norm": False}),
        "class token": ("image", {"head.pool": "mean"}),
        "length of texts": ("text", {"head.normalise": False}),
        "length of images": ("image", {"head.normalise": False}),
        "biases": ("image", {"mlp_bias": False}),
    },
    "clip_older": {
        "the highest ends": ("text", {"eos": 99}),
        "gelu of images": ("image", {"activation": "relu"}),
        "eps": ("image", {"norm_eps": 1e-6}),
    },
    "siglip": {
        "both sides": ("text", {"causal": True}),
        "last token": ("text", {"head.pool": "mean"}),
        "bias of texts": ("text", {"head.bias": False}),
        "last norm of images": ("image", {"final_norm": False}),
        "positions of patches": ("image", {"learned_positions": 0}),
        "activation": ("image", {"activation": "relu"}),
    },
}


def given(want):
    """Texts and images as ours lie, the channels last."""
    return want["input_ids"], want["pixel_values"].transpose(0, 2, 3, 1)


def scores(make_model, params, want):
    """Of a model made anew around the parameters it has a place for."""
    spec = describe(make_model)
    run = jax.jit(lambda params, tokens, pixels: spec.merge(params)(tokens, pixels=pixels))
    return np.asarray(run(kept(params, spec.infos), *given(want)))


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("quick-gelu-slow")
@pytest.mark.catches("texts-end-with-the-last")
@pytest.mark.catches("highest-token-is-any")
@pytest.mark.catches("probe-unscaled")
@pytest.mark.catches("probe-heads-swapped")
@pytest.mark.catches("probe-without-mlp")
@pytest.mark.catches("scores-without-shift")
@pytest.mark.catches("scores-without-scale")
@pytest.mark.parametrize("case", CASES)
def test_scores(case):
    """Of four images with three texts, which are scored as `transformers` scores them."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    found = scores(registry.maker(config), params, want)
    assert found.shape == (4, 3)
    np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE)


OFFS = [(case, off) for case in OFF for off in OFF[case]]


@pytest.mark.parametrize(("case", "off"), quick_first(OFFS, [OFFS[5], OFFS[-5]]))
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    which, fields = OFF[case][off]
    parts = {"text": config.text_encoder(), "image": config.image_encoder()}
    # A head that leaves the length as it is makes no pair, so it is put in place afterwards.
    length = fields.pop("head.normalise", None) if "head.normalise" in fields else None
    parts[which] = switched_off(parts[which], fields)

    def make(rngs):
        first = {"log_scale": config.log_scale, "shift": config.shift}
        model = DualEncoder(**parts, rngs=rngs, **first)
        if length is not None:
            head = getattr(model, which).answers
            head.head = dataclasses.replace(head.head, normalise=length)
        return model

    want = expected(case)
    assert np.abs(scores(make, params, want) - want["logits"]).max() > LEAST_MOVED


def test_segments_say_where_a_text_ends_as_its_token_does():
    config, params = read_params(GOLDEN / "clip")
    tokens, pixels = map(jnp.asarray, given(expected("clip")))
    model = describe(registry.maker(config)).merge(jax.tree.map(jnp.asarray, params))
    ends = (tokens == config.eos).argmax(axis=1)
    segments = jnp.where(jnp.arange(tokens.shape[1]) <= ends[:, None], 0, -1)
    assert len(set(ends.tolist())) == 3
    np.testing.assert_array_equal(
        model(tokens, pixels=pixels, segments=segments), model(tokens, pixels=pixels)
    )


@pytest.mark.slow
@pytest.mark.catches("one-number-unread")
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


def test_files_with_saved_positions_and_halves_are_read(tmp_path):
    """As older ones have them, in 16 bits: one number of no dims among them."""
    weights = load_file(GOLDEN / "clip" / "model.safetensors")
    half = {name: x.astype(np.float16) for name, x in weights.items()}
    half["text_model.embeddings.position_ids"] = np.arange(20)[None]
    half["vision_model.embeddings.position_ids"] = np.arange(17)[None]
    save_file(half, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings("clip")))
    import_checkpoint(tmp_path, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    again = load_file(tmp_path / "export" / "model.safetensors")
    assert again["logit_scale"].dtype == np.float16 and again["logit_scale"].shape == ()
    assert all(np.array_equal(half[name], x) for name, x in again.items())


def of(case, part=None, **changes):
    """Settings of a case with some changed, in an encoder of it."""
    said = settings(case)
    if part is None:
        return {**said, **changes}
    return {**said, f"{part}_config": {**said[f"{part}_config"], **changes}}


def read(said):
    return conversion_of(said).config_from(said)


@pytest.mark.catches("older-settings-beside")
def test_older_files_say_sizes_twice():
    """Then the second object counts alone, what it leaves out by default."""
    twice = {**of("clip"), "text_config_dict": {"num_hidden_layers": 5, "hidden_size": 64}}
    config = read({**twice, "vision_config_dict": None})
    assert (config.text.layers, config.text.embed, config.image.layers) == (5, 64, 2)
    assert (config.eos, read(of("clip")).eos, read(of("clip_older")).eos) == (49407, 100, None)


def test_what_is_left_out_is_as_published():
    clip = read({"model_type": "clip", "text_config": None, "vision_config": {}})
    part = {"activation": "quick_gelu", "norm_eps": 1e-5, "layers": 12}
    assert clip == CLIPConfig(
        text=EncoderPart(embed=512, heads=8, mlp=2048, **part),
        image=EncoderPart(embed=768, heads=12, mlp=3072, **part),
        patch_height=32,
        patch_width=32,
    )
    siglip = read({"model_type": "siglip", "vision_config": {"patch_size": 14}})
    part = {"activation": "gelu_tanh", "norm_eps": 1e-6, "layers": 12}
    both = EncoderPart(embed=768, heads=12, mlp=3072, **part)
    assert siglip == SigLIPConfig(text=both, image=both, patch_height=14, patch_width=14)
    assert math.isclose(math.exp(siglip.log_scale), 10)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            of("clip", architectures=["CLIPForImageClassification"]),
            "only classes that end in Model",
        ),
        (of("clip", text_config=[]), r"'text_config' is \[\]; it must be dict or null"),
        (of("clip", "text", hidden_act="mish"), "hidden_act = 'mish' is not supported"),
        (of("clip", "text", num_attention_heads=5), "5 heads do not divide embed 32"),
        (of("clip", "text", vocab_size=0), "'vocab_size': found 0; give 1 or more"),
        (of("clip", "text", eos_token_id=128), "model.eos: found 128, which is none of the vocab"),
        (of("clip", "vision", image_size=9), "patches of 2 pixels do not divide the image's"),
        (of("clip", "vision", hidden_size="48"), "'hidden_size' is '48'; it must be int"),
        (of("clip", projection_dim=0), "'projection_dim': found 0; give 1 or more"),
        (of("clip", logit_scale_init_value="2"), "'logit_scale_init_value' is '2'; it must be fl"),
        (of("siglip", "vision", vision_use_head=False), "vision_use_head = False is not supported"),
        (of("siglip", "text", projection_size=32), "projection_size 32 and images of hidden_size"),
        (
            {**of("clip", "vision")["vision_config"], "model_type": "clip_vision_model"},
            "model_type 'clip_vision_model' is not among the families here; known: ",
        ),
        (of("clip", model_type="qwen2"), "qwen2 with vision_config is not supported; only text"),
        (of("clip", "text", num_hidden_layers=20_000), "'num_hidden_layers'|model.text|layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said, message):
    with pytest.raises(InputError, match=message):
        read(said)


@pytest.mark.catches("rectangles-exported")
def test_rectangles_are_not_exported():
    config = read(of("clip"))
    for changes, message in (
        ({"height": 4}, "clip config: height 4 and width 8 cannot be exported"),
        ({"patch_width": 4}, "clip config: patch_height 2 and patch_width 4 cannot be exported"),
    ):
        with pytest.raises(InputError, match=message):
            CONVERSIONS["clip"].settings_of(dataclasses.replace(config, **changes))


@pytest.mark.catches("embeddings-of-two-widths")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": {"head": HeadConfig(pool="last")}}, "model.text: its head gives no embedding of"),
        ({"image": {"head": HeadConfig(normalise=True)}}, "model.image: its head gives no embed"),
        (
            {"image": {"head": HeadConfig(pool="first", outputs=9, normalise=True)}},
            "embeddings of texts have 24 numbers and those of images 9; give both as many",
        ),
    ],
)
def test_encoders_that_do_not_fit_are_refused(fields, message):
    config = read(of("clip"))
    parts = {"text": config.text_encoder(), "image": config.image_encoder()}
    for name, changes in fields.items():
        parts[name] = dataclasses.replace(parts[name], **changes)
    with pytest.raises(InputError, match=message):
        DualEncoder(**parts, rngs=nnx.Rngs(0), log_scale=0.0)


def test_two_of_one_kind_are_refused():
    text = read(of("clip")).text_encoder()
    with pytest.raises(InputError, match="one encoder reads texts and the other images"):
        DualEncoder(text, text, rngs=nnx.Rngs(0), log_scale=0.0)


def test_a_head_of_another_kind_is_refused():
    with pytest.raises(InputError, match="model.head: two encoders tell scores of images and"):
        dataclasses.replace(read(of("clip")), head=HeadConfig(outputs=3, pool="first"))


@pytest.mark.catches("query-reads-a-part")
def test_a_learned_query_reads_whole_rows():
    config, params = read_params(GOLDEN / "siglip")
    model = describe(registry.maker(config)).merge(jax.tree.map(jnp.asarray, params))
    hidden, _ = model.image.hidden(pixels=jnp.asarray(given(expected("siglip"))[1]))
    with pytest.raises(InputError, match="model.head.pool: 'attention' reads whole rows, and"):
        model.image.told(hidden, documents=2)
