"""Models of images give what `transformers` does (tests/golden)."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.errors import InputError
from colossax.models import DINOv2Config, ViTConfig
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.models.registry import config_from_json, config_to_json, family_of, maker
from colossax.nn import Decoder, HeadConfig, TransformConfig, describe
from tests.cases import quick_first
from tests.models.test_parity import (
    FACTS,
    GOLDEN,
    LEAST_MOVED,
    TOLERANCE,
    expected,
    kept,
    switched_off,
)

CASES = [name for name, facts in FACTS.items() if facts.get("images")]

# Per case: what its model must not do without, as the fields that switch it off.
OFF = {
    "vit": {
        "positions": {"learned_positions": 0},
        "patch bias": {"patches.bias": False},
        "norms before sublayers": {"norms": "output"},
        "last norm": {"final_norm": False},
        "attention bias": {"qkv_bias": False},
        "output bias": {"out_bias": False},
        "mlp bias": {"mlp_bias": False},
        "activation": {"activation": "relu"},
        "class token": {"head.pool": "last"},
        "mean of all": {"head.pool": "mean"},
        "bias of classes": {"head.bias": False},
    },
    "dinov2": {
        "layer scale": {"layer_scale": None},
        "positions": {"learned_positions": 0},
    },
    "dinov2_gated": {"layer scale": {"layer_scale": None}, "activation": {"activation": "gelu"}},
    "vit_rectangle": {"positions": {"learned_positions": 0}, "activation": {"activation": "relu"}},
}


def pixels_of(want):
    """Images as ours lie, the channels last."""
    return want["pixel_values"].transpose(0, 2, 3, 1)


def found(make_model, params, pixels):
    """What a model made anew around the parameters it has a place for tells."""
    spec = describe(make_model)
    run = jax.jit(lambda params, pixels: spec.merge(params)(pixels=pixels))
    return np.asarray(run(kept(params, spec.infos), pixels))[:, 0]


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("patches-by-column")
@pytest.mark.catches("vit-sizes-swapped")
@pytest.mark.catches("class-token-last")
@pytest.mark.catches("scale-without-gain")
@pytest.mark.catches("mean-with-the-first")
@pytest.mark.catches("gate-behind-up")
@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    got = found(maker(config), params, pixels_of(want))
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=TOLERANCE)


OFFS = [(case, off) for case in OFF for off in OFF[case]]


@pytest.mark.parametrize(("case", "off"), quick_first(OFFS, OFFS[1:3]))
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    want, fields = expected(case), OFF[case][off]
    if "norms" in fields:
        params = renamed(params)
    decoder = switched_off(config.decoder(), fields)
    got = found(lambda rngs: Decoder(decoder, rngs=rngs), params, pixels_of(want))
    assert np.abs(got - want["logits"]).max() > LEAST_MOVED


def renamed(params):
    """Norms of what sublayers read as those of what they give."""
    layer = params["layers"]["segments"][0]
    names = {"attn_norm": "attn_output_norm", "mlp_norm": "mlp_output_norm"}
    turned = {names.get(name, name): value for name, value in layer.items()}
    return {**params, "layers": {"segments": [turned]}}


def test_the_class_token_counts():
    config, params = read_params(GOLDEN / "vit")
    want = expected("vit")
    token = np.zeros_like(params["patches"]["class_token"])
    without = {**params, "patches": {**params["patches"], "class_token": token}}
    got = found(maker(config), without, pixels_of(want))
    assert np.abs(got - want["logits"]).max() > LEAST_MOVED


@pytest.mark.parametrize("case", CASES)
def test_files_are_written_as_they_were_read(case, tmp_path):
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", GOLDEN / case)
    )
    assert mine.keys() == {name for name in theirs if not name.endswith(".mask_token")}
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert all(mine[name].shape == theirs[name].shape for name in mine)
    config = read_params(GOLDEN / case)[0]
    assert read_params(tmp_path / "export")[0] == config == config_from_json(config_to_json(config))
    asked = [
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "export", GOLDEN / case)
    ]
    same = ("architectures", "image_size", "patch_size", "num_channels", "qkv_bias", "hidden_act")
    assert [asked[0][name] for name in same] == [asked[1][name] for name in same]


def test_a_model_without_classes_tells_the_class_tokens_state(tmp_path):
    """As `ViTModel`, whose files have names of their own and a pooler, which is left aside."""
    weights = load_file(GOLDEN / "vit" / "model.safetensors")
    bare = {n.removeprefix("vit."): x for n, x in weights.items() if n.startswith("vit.")}
    bare["pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    said = {**settings("vit"), "architectures": ["ViTModel"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")  # of a pair with text, and none of its own
    config, params = read_params(tmp_path)
    assert config.head is None
    want = expected("vit")
    state = found(maker(config), params, pixels_of(want))
    classes = state @ weights["classifier.weight"].T + weights["classifier.bias"]
    np.testing.assert_allclose(classes, want["logits"], rtol=0, atol=TOLERANCE)
    import_checkpoint(tmp_path, tmp_path / "checkpoint")


def settings(case, **changes):
    return {**json.loads((GOLDEN / case / "config.json").read_text()), **changes}


def dino(**fields):
    return DINOv2Config(**{"embed": 32, "layers": 1, "heads": 4, "mlp": 128, **fields})


@pytest.mark.catches("width-rounded-down")
@pytest.mark.parametrize("gated", [False, True])
def test_any_width_of_dinov2_is_written_as_a_ratio(gated):
    """Of which the format takes a product, rounded down; of a gate two thirds of that."""
    table = CONVERSIONS["dinov2"]
    activation = "silu" if gated else "gelu"
    for embed in (8, 24, 88):
        for mlp in range(8, 8 * embed, 8):
            config = dino(embed=embed, mlp=mlp, gated=gated, activation=activation)
            assert table.config_from(table.settings_of(config)) == config
    giant = dino(embed=1536, mlp=4096, gated=True, activation="silu")
    assert table.settings_of(giant)["mlp_ratio"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_ratio": 0}, "'mlp_ratio': found 0.0; give a number above 0"),
        ({"use_swiglu_ffn": "no"}, "'use_swiglu_ffn' is 'no'; it must be bool"),
        ({"layerscale_value": None}, "'layerscale_value' is None; it must be float"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        (
            {"architectures": ["Dinov2Backbone"], "patch_size": 3},
            "patches of 3 pixels do not divide the image's height of 8",
        ),
    ],
)
def test_what_is_not_supported_of_dinov2_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        CONVERSIONS["dinov2"].config_from(settings("dinov2", **changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp": 84, "gated": True, "activation": "silu"}, "width 84 cannot .* of 8 alone: 88"),
        ({"gated": True}, "dinov2 config: a gate of gelu cannot be exported; the format has silu"),
        ({"height": 28}, "images of 28 x 224 pixels cannot be exported; .* those of a square"),
        (
            {"head": HeadConfig(outputs=3, pool="first")},
            "dinov2 config: head .* cannot be exported; the format has only",
        ),
    ],
)
def test_what_the_format_of_dinov2_has_no_place_for_is_not_exported(fields, message):
    with pytest.raises(InputError, match=message):
        CONVERSIONS["dinov2"].settings_of(dino(**fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["ViTForMaskedImageModeling"]},
            r"vit with architectures = \['ViTForMaskedImageModeling'\] is not supported; only"
            " classes that end in Model or ForImageClassification are",
        ),
        (
            {"image_size": 9},
            "config.json: model.patch_height: patches of 2 pixels do not divide the image's height"
            " of 9; give one that does, or resize the images to a height of 8",
        ),
        ({"image_size": [8, 8, 3]}, r"'image_size' is \[8, 8, 3\]; it must be one number, or"),
        ({"patch_size": "2"}, "'patch_size' is '2'; it must be int"),
        ({"num_channels": 0}, "'num_channels': found 0; give 1 or more"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        ({"qkv_bias": "no"}, "'qkv_bias' is 'no'; it must be bool"),
        ({"num_attention_heads": 5}, "5 heads do not divide embed 32"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        CONVERSIONS["vit"].config_from(settings("vit", **changes))


@pytest.mark.parametrize(
    "head",
    [
        HeadConfig(outputs=3, pool="mean"),
        HeadConfig(outputs=3, pool="first", transform=TransformConfig()),
    ],
    ids=["mean", "another transform"],
)
def test_heads_that_files_have_no_place_for_are_not_exported(head):
    config, _ = read_params(GOLDEN / "vit")
    other = ViTConfig(**{**vars(config), "head": head})
    with pytest.raises(InputError, match="vit config: head .* cannot be exported; the format has"):
        CONVERSIONS[family_of(other).name].settings_of(other)
