"""Qwen2-VL: files there and back, images of any size, positions of several axes, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.config import Plan, Precision
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.models import registry
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import DecoderConfig, HeadConfig, PatchConfig, RopeConfig, describe, rope_tables
from tests.models.test_encoder_parity import settings
from tests.models.test_parity import GOLDEN, expected
from tests.models.test_seeing_parity import given

VOCAB, PLACES, GRID = 128, 6, (2, 3)
SIDE = max(GRID)


def loaded():
    config, params = read_params(GOLDEN / "qwen2_vl")
    return config, describe(registry.maker(config)), jax.tree.map(jnp.asarray, params)


def points_one_by_one(rows):
    """As the family numbers them: words by one, an image's places from where it begins."""
    found = np.zeros((*rows.shape, 3), np.int32)
    for row, tokens in enumerate(rows):
        next_, at = 0, 0
        while at < len(tokens):
            if tokens[at] < VOCAB:
                found[row, at] = next_
                next_, at = next_ + 1, at + 1
                continue
            for place in range(PLACES):
                down, right = divmod(place, GRID[1])
                found[row, at + place] = next_, next_ + down, next_ + right
            next_, at = next_ + SIDE, at + PLACES
    return found


@pytest.mark.catches("words-behind-all-places")
@pytest.mark.catches("columns-as-rows")
def test_points_are_those_made_one_by_one():
    config, spec, params = loaded()
    model, (tokens, _) = spec.merge(params), given(expected("qwen2_vl"), config)
    found = model._points(jnp.asarray(tokens), None, GRID)
    np.testing.assert_array_equal(found, points_one_by_one(tokens))


@pytest.mark.catches("images-of-other-documents-counted")
def test_documents_packed_into_a_row_begin_anew():
    config, spec, params = loaded()
    tokens, pixels = map(jnp.asarray, given(expected("qwen2_vl"), config))
    tokens = np.array(tokens)
    first, second = tokens[0, :20], tokens[0, 30:50].copy()
    second[second >= VOCAB] = 5
    model = spec.merge(params)
    row = np.concatenate([first, second])[None]
    apart = [
        np.asarray(model(jnp.asarray(one)[None], pixels=pixels[:1])) for one in (first, second)
    ]
    where = {
        "segments": jnp.repeat(jnp.arange(2), 20)[None],
        "positions": jnp.tile(jnp.arange(20), 2)[None],
    }
    found = model._points(jnp.asarray(row), where["positions"], GRID)[0]
    alone = [points_one_by_one(one[None])[0] for one in (first, second)]
    np.testing.assert_array_equal(found, np.concatenate(alone))
    packed = model(jnp.asarray(row), pixels=pixels[:1], **where)
    np.testing.assert_allclose(packed[0], np.concatenate([x[0] for x in apart]), atol=2e-5)


def test_tables_of_several_axes_are_those_of_each():
    """Pairs of dims of an axis are those that a model of this one axis has there."""
    points = np.random.default_rng(0).integers(0, 50, (2, 7, 3))
    several = RopeConfig(theta=100.0, sections=(2, 3, 3))
    cos, sin = rope_tables(jnp.asarray(points), several, 16)
    first = 0
    for axis, pairs in enumerate(several.sections):
        alone = rope_tables(jnp.asarray(points[..., axis]), RopeConfig(theta=100.0), 16)
        for whole, one in zip((cos, sin), alone, strict=True):
            np.testing.assert_array_equal(
                whole[..., first : first + pairs], one[..., first : first + pairs]
            )
        first += pairs
    same = rope_tables(jnp.asarray(points[..., 0]), several, 16)
    plain = rope_tables(jnp.asarray(points[..., 0]), RopeConfig(theta=100.0), 16)
    np.testing.assert_allclose(same[0], plain[0], atol=1e-6)
    restarted = RopeConfig(theta=100.0, sections=(4, 4), restart=True)
    cos, _ = rope_tables(jnp.asarray(points[..., :2]), restarted, 16)
    for axis in range(2):
        alone, _ = rope_tables(jnp.asarray(points[..., axis]), RopeConfig(theta=100.0), 8)
        np.testing.assert_array_equal(cos[..., 4 * axis : 4 * axis + 4], alone)


def test_images_of_any_size_are_read():
    """Each a model of its own compiled; tokens of an image follow from its size."""
    _, spec, params = loaded()
    model = spec.merge(params)
    assert (model.places, model.square) == (None, (4, 4))
    for height, width in ((4, 4), (12, 8)):
        states = model.seen(jnp.ones((1, 2, height, width, 3)))
        assert states.shape == (1, 2 * height * width // 16, 64)
    bound = Plan().bind(jax.devices()[:1])
    generator = Generator(spec, bound, params, slots=32, eos=-1)
    places = [VOCAB + k for k in range(6)]
    for shape in ((1, 12, 8, 3), (1, 8, 12, 3)):
        found = generator.generate([*places, 5], images=np.ones(shape, np.float32), max_tokens=3)
        assert len(found.tokens) == 3
    for images, message in (
        (np.ones((1, 6, 8, 3)), "sides of the model's are multiples of 4 and 4, with 3 channels"),
        (np.ones((1, 8, 8, 1)), "sides of the model's are multiples of 4 and 4, with 3 channels"),
    ):
        with pytest.raises(InputError, match=message):
            generator.generate([5], images=images, max_tokens=3)
    with pytest.raises(InputError, match="prompt: token 134 is outside the vocabulary of 134"):
        generator.generate([134], images=np.ones((1, 8, 12, 3)), max_tokens=3)
    with pytest.raises(InputError, match="squares of 2 x 2 patches do not divide an image's 3 x 4"):
        model.seen(jnp.ones((1, 1, 6, 8, 3)))
    with pytest.raises(InputError, match="patches of 2 pixels do not divide the image's height"):
        model.seen(jnp.ones((1, 1, 5, 8, 3)))


@pytest.mark.catches("counts-in-sixteen-bits")
def test_places_are_counted_in_whole_numbers_under_any_plan():
    """In 16 bits 257 of them would be 256."""
    _, spec, params = loaded()
    asked = spec.merge(params).cache_spec(seats=1, slots=8)["images"]
    kept = asked.zeros(Precision(accumulation="bfloat16", compute="bfloat16"))
    dtypes = {name: x.dtype.name for name, x in kept.items()}
    assert dtypes == {"states": "bfloat16", "count": "int32", "grid": "int32"}


def test_files_are_written_as_they_were_read(tmp_path):
    import_checkpoint(GOLDEN / "qwen2_vl", tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "export", GOLDEN / "qwen2_vl")
    )
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    config = read_params(GOLDEN / "qwen2_vl")[0]
    again = registry.config_from_json(registry.config_to_json(config))
    assert read_params(tmp_path / "export")[0] == config == again


def test_newer_names_of_the_same_tensors_are_read(tmp_path):
    weights = load_file(GOLDEN / "qwen2_vl" / "model.safetensors")
    other = {
        name.replace("visual.", "model.visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): x
        for name, x in weights.items()
    }
    save_file(other, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings("qwen2_vl")))
    mine, theirs = (read_params(folder)[1] for folder in (tmp_path, GOLDEN / "qwen2_vl"))
    assert all(map(np.array_equal, jax.tree.leaves(mine), jax.tree.leaves(theirs)))


PUBLISHED = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "use_sliding_window": False,
    "vision_config": {"hidden_size": 3584, "in_chans": 3, "spatial_patch_size": 14},
}


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 8_291_375_616),
        (
            {
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "vocab_size": 151_936,
                "tie_word_embeddings": True,
                "vision_config": {"hidden_size": 1536},
            },
            2_208_985_600,
        ),
    ],
    ids=["7B", "2B"],
)
def test_published_parameter_counts_of_files_without_text_config(changes, parameters):
    """As the published files are written: settings of the text beside those of the images."""
    config = CONVERSIONS["qwen2_vl"].config_from({**PUBLISHED, **changes})
    assert (config.sections, config.text.rope_theta) == ((16, 24, 24), 1e6)
    assert describe(registry.maker(config)).parameter_count() == parameters


def of(part=None, **changes):
    said = settings("qwen2_vl")
    if part is None:
        return {**said, **changes}
    return {**said, f"{part}_config": {**said[f"{part}_config"], **changes}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (of("vision", hidden_size=32), "vision_config.hidden_size is 32, and the text's is 64"),
        (of("vision", hidden_act="mish"), "hidden_act = 'mish' is not supported"),
        (of("vision", patch_size=0), "'patch_size': found 0; give 1 or more"),
        (of("vision", num_heads=5), "5 heads do not divide embed 48"),
        (of("text", rope_parameters={"mrope_section": [2, 3]}), "sections: .2, 3. are 5 pairs"),
        (of("text", rope_parameters={"mrope_section": [4, 4]}), "found 2 axes, and places have"),
        (of("text", rope_parameters={"mrope_section": 3}), "'mrope_section' is 3; it must be"),
        (of("text", hidden_act="gelu"), "qwen2 with hidden_act = 'gelu' is not supported"),
        (of(image_token_id=128), "model.image_token: found 128, which is none of the vocab"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said, message):
    with pytest.raises(InputError, match=message):
        CONVERSIONS["qwen2_vl"].config_from(said)


def test_what_the_format_has_no_place_for_is_not_exported():
    table, config = CONVERSIONS["qwen2_vl"], read_params(GOLDEN / "qwen2_vl")[0]
    wide = dataclasses.replace(config.image, mlp=50)
    for changes, message in (
        ({"patch_width": 4}, "patch_height 2 and patch_width 4 cannot be exported"),
        ({"image": wide}, "image.mlp 50 cannot be exported; the format has its share"),
    ):
        with pytest.raises(InputError, match=message):
            table.settings_of(dataclasses.replace(config, **changes))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"restart": True}, "model.rope.restart: frequencies begin anew for each of several axes"),
        ({"sections": (2, 6), "restart": True}, "found .2, 6., and frequencies that begin anew"),
    ],
)
def test_axes_that_make_no_sense_are_refused(rope, message):
    with pytest.raises(InputError, match=message):
        RopeConfig(**rope)


def test_images_of_any_size_have_no_learned_positions():
    patches = PatchConfig(height=4, width=4, patch_height=2, patch_width=2, any_size=True)
    sizes = {"embed": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp": 8}
    with pytest.raises(InputError, match="model.patches.any_size: images of other sizes have"):
        DecoderConfig(vocab=0, patches=patches, causal=False, max_seq=5, head=HeadConfig(), **sizes)
