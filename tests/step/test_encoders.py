"""Encoders and heads train on every mesh as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax import Plan, boost
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.nn import (
    Decoder,
    DecoderConfig,
    HeadConfig,
    RopeConfig,
    TransformConfig,
    describe,
    pure,
)
from colossax.optim import adamw
from colossax.step.checks.given import check_tokens, known_numbers
from colossax.tasks import (
    classification_loss,
    contrastive_loss,
    masked_token_loss,
    next_token_loss,
    preference_loss,
    value_loss,
)
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS, batch

BERT = {
    "norm": "layer",
    "gated": False,
    "activation": "gelu",
    "norms": "sum",
    "final_norm": False,
    "learned_positions": 64,
    "embed_norm": True,
    "qkv_bias": True,
    "tied": True,
}
CLASSES = HeadConfig(
    outputs=3, pool="first", transform=TransformConfig(activation="tanh", norm=False)
)
MODELS = {
    "sums": (
        masked_token_loss(),
        {
            **BERT,
            "causal": False,
            "token_types": 2,
            "transform": TransformConfig(),
            "head_bias": True,
        },
    ),
    "windows": (
        masked_token_loss(),
        {
            "causal": False,
            "norm": "layer",
            "norm_bias": False,
            "embed_norm": True,
            "first_norm": False,
            "window": 8,
            "full_layers": (0, 2),
            "rope": RopeConfig(),
            "local_rope": RopeConfig(theta=30.0),
            "transform": TransformConfig(bias=False),
            "tied": True,
        },
    ),
    "classes": (classification_loss(), {**BERT, "causal": False, "head": CLASSES}),
    "classes of tokens": (
        classification_loss(),
        {"causal": False, "rope": RopeConfig(), "head": HeadConfig(outputs=3)},
    ),
    "reward": (
        preference_loss(),
        {"rope": RopeConfig(), "head": HeadConfig(outputs=1, pool="last", bias=False)},
    ),
    "values": (value_loss(), {"rope": RopeConfig(), "head": HeadConfig(outputs=1)}),
    "embedding": (
        contrastive_loss(documents=4, temperature=0.5),
        {
            "causal": False,
            "rope": RopeConfig(),
            "head": HeadConfig(pool="mean", normalise=True),
        },
    ),
}


def made(model):
    sizes = {"vocab": 64, "embed": 32, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 8}
    return DecoderConfig(**sizes, mlp=64, max_seq=64, init_std=0.2, **MODELS[model][1])


def given(model):
    """Rows of two documents, or of four, with what the model's loss asks for."""
    rows = batch()
    draw = np.random.default_rng(1)
    if model == "sums":
        rows["token_types"] = draw.integers(0, 2, rows["tokens"].shape).astype(np.int32)
    if model == "classes":
        rows["labels"] = draw.integers(-1, 3, (len(rows["tokens"]), 2)).astype(np.int32)
    if model == "classes of tokens":
        rows["targets"] = draw.integers(-1, 3, rows["tokens"].shape).astype(np.int32)
    if model == "values":
        rows["token_values"] = draw.standard_normal(rows["tokens"].shape).astype(np.float32)
    if model == "embedding":
        places = np.arange(rows["tokens"].shape[1])
        rows["segments"] = np.broadcast_to(places // 8, rows["tokens"].shape).astype(np.int32)
        rows["positions"] = np.broadcast_to(places % 8, rows["tokens"].shape).astype(np.int32)
    return rows


def run(plan, model, devices=None):
    """Losses and gradient norms of three steps."""
    config, rows = made(model), given(model)
    state, step = boost(
        lambda rngs: Decoder(config, rngs=rngs),
        adamw(3e-3, eps=1e-3),
        MODELS[model][0],
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, rows)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


ALIKE = ("stages", "stages, ring", "host memory")
"""Plans under which layers of several kinds do not take turns."""

CASES = [
    (name, model)
    for model in MODELS
    for name in PLANS
    if not (name in ALIKE and model == "windows")
]
QUICK = [("ulysses", "classes")]
"""Layers of several kinds are no scan: each is compiled, for a second or more. A sweep has them."""


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_losses_close(run(PLANS[name], model), truth(model))


@pytest.mark.parametrize("model", quick_first(MODELS, ["classes"]))
def test_each_learns(model):
    losses = truth(model)[:, 0]
    assert losses[2] < losses[0]


def traced(loss, config, rows):
    jax.eval_shape(lambda rows: loss(Decoder(config, rngs=nnx.Rngs(0)), rows)[0], rows)


@pytest.mark.catches("encoder-tells-what-it-sees")
@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        ("sums", next_token_loss(), "attention is not causal, so it sees the token that it is to"),
        ("classes", masked_token_loss(), "stands where logits of the vocabulary are asked for"),
        ("sums", classification_loss(), "the model has none but that of its vocabulary; give head"),
        ("embedding", classification_loss(), "model.head.outputs: there are none to tell classes"),
        ("reward", classification_loss(), "batch: it has no 'labels' for a head that pools"),
        ("classes", preference_loss(), "outputs: found 3, and a reward or value is one number"),
        ("values", preference_loss(), "model.head.pool: the head tells something of each token"),
        ("classes of tokens", contrastive_loss(documents=4), "give pool, one of first, last, mean"),
    ],
)
def test_losses_that_a_head_does_not_serve_are_refused(model, loss, message):
    with pytest.raises(InputError, match=message):
        traced(loss, made(model), batch())


def test_a_causal_model_is_given_no_masked_rows():
    config = dataclasses.replace(made("reward"), head=None)
    with pytest.raises(InputError, match="attention is causal, so a masked token is told by"):
        traced(masked_token_loss(), config, batch())


def test_kinds_of_tokens_go_to_models_that_know_some():
    rows = {**batch(), "token_types": np.zeros((8, 32), np.int32)}
    with pytest.raises(InputError, match="token_types: the model has no table of kinds of tokens"):
        traced(masked_token_loss(), made("windows"), rows)


@pytest.mark.catches("kinds-unchecked")
@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("sums", "token_types", r"batch 'token_types': 2 at \[3, 5\], and the model knows 0 to 1"),
        ("classes", "labels", r"batch 'labels': 3 at \[3, 1\], and the model knows 0 to 2"),
    ],
)
def test_numbers_that_the_model_has_no_part_for_are_refused(model, name, message):
    rows = given(model)
    rows[name][3, 5 % rows[name].shape[1]] = 2 if name == "token_types" else 3
    infos = describe(lambda rngs: Decoder(made(model), rngs=rngs)).infos
    known = known_numbers(infos)
    check_tokens(given(model), known)
    with pytest.raises(InputError, match=message):
        check_tokens(rows, known)


@pytest.mark.sweep
@pytest.mark.catches("kind-0-left-out")
def test_a_decoder_with_kinds_of_tokens_decodes_what_it_says():
    """Kind 0 is added with a cache as without one."""
    config = dataclasses.replace(made("reward"), head=None, layers=1, token_types=2)
    spec = describe(lambda rngs: Decoder(config, rngs=rngs))
    params = pure(Decoder(config, rngs=nnx.Rngs(0)))
    prompt = jnp.arange(1, 7)
    generator = Generator(spec, Plan().bind(jax.devices()[:1]), params, slots=8, sequences=1)
    found = generator.generate(prompt.tolist(), max_tokens=1, temperature=0.0).tokens
    logits = spec.merge(params)(prompt[None])
    assert found == (int(np.argmax(logits[0, -1])),)
    assert not np.allclose(logits, spec.merge(zero_kinds(params))(prompt[None]))


def zero_kinds(params):
    return {**params, "token_types": jax.tree.map(jnp.zeros_like, params["token_types"])}


def test_an_encoder_generates_nothing():
    model = Decoder(made("sums"), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="its attention is not causal, so it generates no text"):
        model.cache_spec(seats=1, slots=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": {"pool": "frist"}}, "model.head.pool: 'frist' is unknown; did you mean 'first'"),
        ({"alibi": True}, "model.alibi: its penalties are of tokens before one's own"),
        ({"first_norm": False, "norms": "sum"}, "norms 'sum' are not of what attention reads"),
        ({"transform": TransformConfig(), "head": HeadConfig()}, "model.transform: it stands"),
        ({"token_types": 2, "token_width": 8}, "model.token_types: their table is as wide as"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        if isinstance(fields.get("head"), dict):
            fields = {"head": HeadConfig(**fields["head"])}
        DecoderConfig(
            **{"vocab": 8, "embed": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4},
            **{"mlp": 8, "max_seq": 8, "causal": False, **fields},
        )
