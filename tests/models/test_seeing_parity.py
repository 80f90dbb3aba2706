"""Decoders that read images give the logits and greedy tokens of `transformers` (tests/golden)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Generator, Request, open_checkpoint
from colossax.models import LlavaConfig, registry
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import (
    EncoderPart,
    HeadConfig,
    ProjectorConfig,
    RopeConfig,
    SeeingDecoder,
    describe,
)
from tests.cases import quick_first
from tests.models.test_encoder_parity import settings
from tests.models.test_parity import FACTS, GOLDEN, LEAST_MOVED, expected, kept, switched_off

CASES = [name for name, facts in FACTS.items() if facts.get("seeing")]
TOLERANCE = {"qwen2_vl": 2e-5}
"""Else 1e-5: of the others float32 of `transformers` itself is nearer to its float64."""

# Per case: what its parts must not do without, as the fields that switch it off.
OFF = {
    "llava": {
        "rope": ("text", {"rope": None}),
        "causal": ("image", {"causal": False, "norm_eps": 0.1}),
        "norm of embeddings": ("image", {"embed_norm": False}),
        "positions": ("image", {"learned_positions": 0}),
        "quick gelu": ("image", {"activation": "gelu"}),
        "bias of the maps": ("projector", {"bias": False}),
        "activation of the maps": ("projector", {"activation": "relu"}),
    },
    "llava_older": {
        "one layer": ("image", {"activation": "relu"}),
        "gelu by tanh": ("projector", {"activation": "silu"}),
    },
    "qwen2_vl": {
        "axes of words": ("text", {"rope": RopeConfig(theta=100.0)}),
        "shares of axes": ("text", {"rope": RopeConfig(theta=100.0, sections=(3, 3, 2))}),
        "frequencies that begin anew": (
            "image",
            {"rope": RopeConfig(theta=10_000.0, sections=(3, 3))},
        ),
        "norm of merged patches": ("projector", {"norm_eps": None}),
        "query bias": ("text", {"qkv_bias": False}),
        "bias of the encoder": ("image", {"qkv_bias": False}),
    },
}


def given(want, config):
    """Tokens with a number for each place, and the images of each row, channels last."""
    tokens = want["input_ids"].copy()
    for row in tokens:
        places = np.flatnonzero(row == config.image_token)
        row[places] = config.text.vocab + np.arange(len(places))
    pixels = want["pixel_values"].transpose(0, 2, 3, 1)
    return tokens, pixels.reshape(len(tokens), -1, *pixels.shape[1:])


def told(make_model, params, want, config):
    """Logits of a model made anew around the parameters it has a place for."""
    spec = describe(make_model)
    run = jax.jit(lambda params, tokens, pixels: spec.merge(params)(tokens, pixels=pixels))
    return np.asarray(run(kept(params, spec.infos), *given(want, config)))


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("places-one-on")
@pytest.mark.catches("class-token-among-patches")
@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    found = told(registry.maker(config), params, want, config)
    np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE.get(case, 1e-5))


OFFS = [(case, off) for case in OFF for off in OFF[case]]


@pytest.mark.parametrize(("case", "off"), quick_first(OFFS, [OFFS[5], OFFS[-1]]))
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    which, fields = OFF[case][off]
    parts = {"text": config.decoder(), "image": config.image_encoder()}
    parts["projector"] = config.projector
    if which == "projector":
        parts[which] = dataclasses.replace(parts[which], **fields)
    else:
        parts[which] = switched_off(parts[which], fields)
    want = expected(case)

    def make(rngs):
        return SeeingDecoder(**parts, rngs=rngs)

    assert np.abs(told(make, params, want, config) - want["logits"]).max() > LEAST_MOVED


@pytest.mark.catches("places-unseen-in-generation")
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"tensor": 2}, {"stage": 2}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_with_a_cache(case, mesh, tmp_path):
    """An image looked at once, then its places, words behind them, and one token at a time."""
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    config, want = read_params(GOLDEN / case)[0], expected(case)
    devices = jax.devices()[: max(mesh.values())]
    loaded = open_checkpoint(tmp_path / "checkpoint").load(Plan(mesh=mesh), devices)
    generator = loaded.generator(slots=64)
    tokens, pixels = given(want, config)
    prompt = tokens[0, : len(want["prompt"])].tolist()
    found = generator.generate(prompt, images=pixels[0, :1], max_tokens=32)
    assert found.tokens == tuple(want["greedy"].tolist())
    other = generator.generate(prompt, images=pixels[0, 1:], max_tokens=32)
    assert other.tokens != found.tokens
    asked = Request(prompt=tuple(prompt), images=pixels[0, :1], max_tokens=4)
    words = Request(prompt=(5, 6, 7), max_tokens=4)
    both = generator.generate_all([words, asked])
    assert both[1].tokens == found.tokens[:4]
    assert both[0].tokens == generator.generate((5, 6, 7), max_tokens=4).tokens


@pytest.mark.catches("any-place-in-a-prompt")
def test_images_that_do_not_fit_are_refused():
    config, params = read_params(GOLDEN / "llava")
    bound = Plan().bind(jax.devices()[:1])
    generator = Generator(describe(registry.maker(config)), bound, params, slots=24)
    image = np.zeros((1, 8, 8, 3), np.float32)
    for prompt, images, message in (
        ([128], None, "prompt: token 128 is outside the vocabulary of 128"),
        ([128 + 16], image, "prompt: token 144 is outside the vocabulary of 144"),
        ([1], image[0], r"images: found shape \[8, 8, 3\], and the model's are 8 high and 8 wide"),
        ([1], image[:, :4], r"images: found shape \[1, 4, 8, 3\].*give \[images, 8, 8, 3\]"),
        ([1], np.zeros((2, 8, 8, 3)), "images: 2 of them take 32 tokens, above the 24 of a seq"),
    ):
        with pytest.raises(InputError, match=message):
            generator.generate(prompt, images=images, max_tokens=4)
    config, params = read_params(GOLDEN / "llama")
    generator = Generator(describe(registry.maker(config)), bound, params, slots=8)
    with pytest.raises(InputError, match="images: the model reads none among its tokens"):
        generator.generate([0], images=image, max_tokens=4)


def test_a_batch_of_other_images_is_refused():
    config, params = read_params(GOLDEN / "llava")
    model = describe(registry.maker(config)).merge(jax.tree.map(jnp.asarray, params))
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(InputError, match="found shape .*; give the images of each row"):
        model(tokens, pixels=jnp.zeros((1, 8, 8, 3)))
    with pytest.raises(InputError, match="images are 8 high and 8 wide with 3 channels"):
        model(tokens, pixels=jnp.zeros((1, 2, 8, 4, 3)))
    with pytest.raises(InputError, match="and embeddings are given; give tokens"):
        model.hidden(embeddings=jnp.zeros((1, 4, 64)), pixels=jnp.zeros((1, 1, 8, 8, 3)))


@pytest.mark.catches("layer-behind-the-one-that-is-read")
@pytest.mark.parametrize("case", ["llava", "llava_older"])
def test_files_are_written_as_they_were_read(case, tmp_path):
    """But for layers behind the one whose states are read, which are left out."""
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", GOLDEN / case)
    )
    last = {"llava": 2, "llava_older": 1}[case]
    unread = [f"vision_tower.encoder.layers.{layer}." for layer in range(last, 3)]
    read = {name: x for name, x in theirs.items() if not name.startswith(tuple(unread))}
    assert mine.keys() == read.keys() and len(read) < len(theirs)
    norm = {f"vision_tower.post_layernorm.{end}" for end in ("weight", "bias")}
    assert all(np.array_equal(mine[name], read[name]) for name in read.keys() - norm)
    assert np.all(mine["vision_tower.post_layernorm.weight"] == 1)
    config, again = (read_params(folder)[0] for folder in (GOLDEN / case, tmp_path / "export"))
    assert config == again == registry.config_from_json(registry.config_to_json(config))
    said = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (said["vision_feature_layer"], said["image_seq_length"]) == (-1, 16)
    assert said["vision_config"]["num_hidden_layers"] == config.image.layers == last


@pytest.mark.parametrize(
    "names",
    [
        {"vision_tower.": "vision_tower.vision_model."},
        {
            "vision_tower.": "model.vision_tower.",
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ],
    ids=["older", "newer"],
)
def test_other_names_of_the_same_tensors_are_read(names, tmp_path):
    weights = load_file(GOLDEN / "llava" / "model.safetensors")
    other = {
        next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)),
             name): x
        for name, x in weights.items()
    }  # fmt: skip
    assert other.keys() != weights.keys()
    save_file(other, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings("llava")))
    mine, theirs = (read_params(folder)[1] for folder in (tmp_path, GOLDEN / "llava"))
    assert all(map(np.array_equal, jax.tree.leaves(mine), jax.tree.leaves(theirs)))


def read(**changes):
    return CONVERSIONS["llava"].config_from({**settings("llava"), **changes})


def test_what_is_left_out_is_as_published():
    """Published files leave out most sizes of the text."""
    said = {"model_type": "llava", "text_config": {"vocab_size": 32_064}, "vision_config": None}
    config = CONVERSIONS["llava"].config_from(said)
    image = EncoderPart(
        embed=1024, layers=23, heads=16, mlp=4096, activation="quick_gelu", norm_eps=1e-5
    )
    assert (config.image, config.height, config.patch_height) == (image, 336, 14)
    text = config.text
    assert (text.embed, text.layers, text.heads, text.kv_heads, text.mlp, text.eos) == (
        *(4096, 32, 32, 32, 11_008),
        2,
    )
    spec = describe(registry.maker(config))
    # 7,063,427,072 are published, of which a layer of the encoder and its last norm are not read.
    layer = 4 * (1024 * 1024 + 1024) + 2 * 4096 * 1024 + 4096 + 1024 + 4 * 1024
    assert spec.parameter_count() == 7_063_427_072 - layer - 2 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-2, -1]}, r"'vision_feature_layer' is \[-2, -1\]; it must be"),
        ({"vision_feature_layer": -4}, "is -4, and the encoder of images has 3 layers; give 1 to"),
        ({"vision_feature_layer": 0}, "is 0, and the encoder of images has 3 layers; give 1 to 3"),
        ({"vision_feature_select_strategy": "cls"}, "select_strategy = 'cls' is not supported"),
        ({"text_config": {"model_type": "opt"}}, "text_config.model_type = 'opt' is not supported"),
        (
            {"vision_config": {"model_type": "siglip_vision_model"}},
            "vision_config.model_type = 'si",
        ),
        ({"projector_hidden_act": "mish"}, "projector_hidden_act = 'mish' is not supported"),
        ({"image_token_index": 128}, "model.image_token: found 128, which is none of the vocab"),
        ({"multimodal_projector_bias": 1}, "'multimodal_projector_bias' is 1; it must be bool"),
        ({"architectures": ["LlavaForTokenClassification"]}, "architectures = .* is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("which", "changes", "message"),
    [
        ("image", {"final_norm": True}, "model.image: it reads no images, or norms what its last"),
        ("text", {"causal": False}, "model.text: it is no decoder of text alone"),
        ("text", {"head": HeadConfig(outputs=2)}, "model.text.head: a decoder that reads images"),
        ("projector", {"activation": "swish"}, "model.projector.activation: 'swish' is unknown"),
    ],
)
def test_parts_that_do_not_fit_are_refused(which, changes, message):
    config = read()
    parts = {"text": config.decoder(), "image": config.image_encoder()}
    parts["projector"] = config.projector
    with pytest.raises(InputError, match=message):
        parts[which] = dataclasses.replace(parts[which], **changes)
        SeeingDecoder(**parts, rngs=nnx.Rngs(0))


def test_the_class_token_is_a_place_too_where_it_is_asked_for():
    config = read(vision_feature_select_strategy="full")
    assert config.projector == ProjectorConfig(class_token=True)
    spec = describe(registry.maker(config))
    model = spec.merge(jax.tree.map(lambda i: jnp.ones(i.shape, i.dtype), spec.infos))
    assert (model.places, CONVERSIONS["llava"].settings_of(config)["image_seq_length"]) == (17, 17)
    assert model.seen(jnp.ones((1, 2, 8, 8, 3))).shape == (1, 34, 64)


def test_a_head_of_another_kind_is_refused():
    with pytest.raises(InputError, match="model.head: a decoder that reads images tells logits"):
        dataclasses.replace(read(), head=HeadConfig(outputs=3, pool="last"))
    assert isinstance(read(), LlavaConfig)
