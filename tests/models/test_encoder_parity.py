"""Encoders, and other heads than a vocabulary's, give what `transformers` does (tests/golden)."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.errors import InputError
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.models.registry import config_from_json, config_to_json, family_of, maker
from colossax.nn import Decoder, HeadConfig, RopeConfig, TransformConfig, describe
from tests.cases import quick_first
from tests.models.test_parity import (
    FACTS,
    GOLDEN,
    LEAST_MOVED,
    TEXTS,
    TOLERANCE,
    expected,
    kept,
    switched_off,
)

OTHERS = ("pair", "images", "both", "seeing", "sound")
CASES = [
    name
    for name, facts in FACTS.items()
    if name not in TEXTS and not any(facts.get(other) for other in OTHERS)
]
QUICK = ["bert", "modernbert_rows", "bert_rows", "roberta", "llama_rows"]

# Per case: what its model must not do without, as the fields that switch it off.
OFF = {
    "bert": {
        "both sides": {"causal": True},
        "positions": {"learned_positions": 0},
        "kinds of tokens": {"token_types": 0},
        "norm of embeddings": {"embed_norm": False},
        "transform": {"transform": None},
        "head bias": {"head_bias": False},
        "activation": {"activation": "relu"},
    },
    "bert_rows": {
        "first token": {"head.pool": "last"},
        "map before classes": {"head.transform": None},
        "tanh": {"head.transform.activation": "gelu"},
        "bias of classes": {"head.bias": False},
    },
    "bert_tokens": {"bias of classes": {"head.bias": False}},
    "roberta": {
        "positions behind padding": {"position_offset": 3},
        "transform": {"transform": None},
    },
    "roberta_rows": {"map before classes": {"head.transform": None}},
    "modernbert": {
        "window": {"window": 80},
        "window of one more": {"window": 10},
        "rope of windows": {"local_rope": None},
        "rope": {"rope": RopeConfig(theta=30.0)},
        "norm of embeddings": {"embed_norm": False},
        "transform": {"transform": None},
    },
    "modernbert_rows": {
        "mean": {"head.pool": "first"},
        "attention bias": {"qkv_bias": False},
        "norm bias": {"norm_bias": False},
    },
    "llama_rows": {"last token": {"head.pool": "first"}},
    "gpt2_tokens": {"bias of classes": {"head.bias": False}},
}


def found(make_model, params, want):
    """What a model made anew around the parameters it has a place for tells; 0 for padding."""
    spec = describe(make_model)
    mask = want["attention_mask"]
    given = {"segments": np.where(mask, 0, -1).astype(np.int32)}
    if "token_type_ids" in want and "token_types" in spec.infos:
        given["token_types"] = want["token_type_ids"]
    run = jax.jit(lambda params, tokens, given: spec.merge(params)(tokens, **given))
    told = np.asarray(run(kept(params, spec.infos), want["input_ids"], given))
    return told[:, 0] if want["logits"].ndim == 2 else told * mask[..., None]


def test_every_case_is_here():
    assert set(CASES) == set(OFF)


@pytest.mark.catches("encoder-looks-back")
@pytest.mark.catches("half-window-whole")
@pytest.mark.catches("padding-pooled")
@pytest.mark.catches("transform-without-norm")
@pytest.mark.parametrize("case", quick_first(CASES, QUICK))
def test_logits(case):
    """Of rows of which one ends in padding, and with kinds of tokens where there are some."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    assert want["logits"].std() >= 1
    np.testing.assert_allclose(
        found(maker(config), params, want), want["logits"], rtol=0, atol=TOLERANCE
    )


OFFS = [(case, off) for case in OFF for off in OFF[case]]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "off"), quick_first(OFFS, OFFS[:3]))
def test_each_feature_counts(case, off):
    config, params = read_params(GOLDEN / case)
    decoder = switched_off(config.decoder(), OFF[case][off])
    want = expected(case)
    got = found(lambda rngs: Decoder(decoder, rngs=rngs), params, want)
    assert np.abs(got - want["logits"]).max() > LEAST_MOVED


@pytest.mark.parametrize("case", quick_first(CASES, QUICK[:2]))
def test_files_are_written_as_they_were_read(case, tmp_path):
    import_checkpoint(GOLDEN / case, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", GOLDEN / case)
    )
    unused = {name for name in theirs if "cls.predictions.decoder.bias" in name}
    assert mine.keys() == theirs.keys() - unused
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    config = read_params(GOLDEN / case)[0]
    assert read_params(tmp_path / "export")[0] == config == config_from_json(config_to_json(config))
    asked = [
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "export", GOLDEN / case)
    ]
    assert asked[0]["architectures"] == asked[1]["architectures"]


def settings(case, **changes):
    return {**json.loads((GOLDEN / case / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "bert",
            {"architectures": ["BertForQuestionAnswering"]},
            r"bert with architectures = \['BertForQuestionAnswering'\] is not supported; only"
            " classes that end in ForMaskedLM or ForSequenceClassification or",
        ),
        ("bert", {"is_decoder": True}, "bert with is_decoder = True is not supported"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key' is not supported",
        ),
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        (
            "roberta",
            {"max_position_embeddings": 4},
            "'max_position_embeddings' is 4, and positions begin behind pad_token_id 3; give more",
        ),
        (
            "modernbert_rows",
            {"classifier_pooling": "max"},
            "classifier_pooling = 'max' is not supported; only 'cls' or 'mean' is",
        ),
        (
            "modernbert",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types with 'sliding_attention' first are not supported",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 10.0}}},
            "rope scaling 'yarn' is not supported",
        ),
        ("llama_rows", {"id2label": 3}, "'id2label' is 3; it must be dict or null"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, changes, message):
    given = settings(case, **changes)
    with pytest.raises(InputError, match=message):
        CONVERSIONS[given["model_type"]].config_from(given)


@pytest.mark.parametrize(
    "head",
    [
        HeadConfig(outputs=3, pool="mean"),
        HeadConfig(outputs=3, pool="first", transform=TransformConfig()),
    ],
    ids=["mean", "another transform"],
)
def test_heads_that_files_have_no_place_for_are_not_exported(head):
    config, _ = read_params(GOLDEN / "bert_rows")
    config = config_from_json({**config_to_json(config), "head": None})
    other = type(config)(**{**vars(config), "head": head})
    with pytest.raises(InputError, match="bert config: head .* cannot be exported; the format has"):
        CONVERSIONS[family_of(other).name].settings_of(other)
