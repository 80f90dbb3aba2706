"""Text whose spans an encoder-decoder writes: the task, its refusals, and that it learns."""

import dataclasses

import jax
import numpy as np
import pytest

from colossax import Plan, boost
from colossax.data import Rows, SpanRows, Split, stack_rows
from colossax.errors import InputError
from colossax.inference import open_checkpoint
from colossax.models import T5Config, maker
from colossax.optim import adamw
from colossax.recipes import recipe
from colossax.tasks import MaskConfig, SpanConfig, next_token_loss, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from tests.launching import write_text
from tests.tasks.small_text import changed, check_resumed, ran, smaller

CONFIG = recipe("t5_stdlib")
MESH = {"fsdp": 2, "tensor": 2, "ring": 2}


def test_it_goes_through_json_and_back():
    config = changed(CONFIG, "data", spans=SpanConfig(rate=0.5, length=10.0))
    assert train_config_from_json(train_config_to_json(config)) == config


@pytest.mark.catches("spans-are-no-identity")
def test_spans_are_part_of_which_run_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    path = str(write_text(tmp_path / "text", documents=4))
    one = task_of(changed(CONFIG, "data", path=path, tokenizer_vocab=300))
    other = changed(CONFIG, "data", path=path, tokenizer_vocab=300, spans=SpanConfig(rate=0.5))
    assert one.identity()["data.spans"] == "0.15, 3"
    assert task_of(other).identity()["data.spans"] == "0.5, 3"
    assert ", 140 tokens of a row read and 32 written" in one.introduction()[0]
    assert {name: x.shape for name, x in one.shapes.items()} == {
        "source": (32, 140),
        **dict.fromkeys(("tokens", "targets", "weights"), (32, 32)),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: changed(CONFIG, "data", spans=None),
            "data.spans: the model is an encoder-decoder, and",
        ),
        (
            lambda: CONFIG.replace(model=recipe("llama_tiny").model),
            "data.spans: the model reads no source; start from a recipe of an encoder-decoder",
        ),
        (
            lambda: changed(CONFIG, "data", masking=MaskConfig()),
            "data.spans: they are of rows that are filled up with text, and nothing is masked",
        ),
        (
            lambda: changed(CONFIG, "sample", prompt="def "),
            "data.spans: they are of rows that are filled up with text, and nothing is masked",
        ),
        (
            lambda: changed(CONFIG, "data", seq_len=300),
            "of 300 tokens 271 are read and 61 written, and the model has 256 and 256; shorten",
        ),
        (
            lambda: changed(CONFIG, "data", spans=SpanConfig(rate=0.9)),
            "data.spans: 139 of the 154 tokens of a row, in 46 spans, leave no token between them",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


def test_a_vocabulary_without_numbers_for_spans_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    path = str(write_text(tmp_path / "text", documents=4))
    config = changed(CONFIG, "data", path=path, tokenizer_vocab=300).replace(
        model=dataclasses.replace(CONFIG.model, vocab=301)
    )
    with pytest.raises(InputError, match="each of the 8 spans of a row needs a number of its own"):
        task_of(config).introduction()


def span_rows(tokens):
    """Of documents `[count, times]`, a quarter of each left out; sentinels are 31 and below."""
    count, times = tokens.shape
    starts, lengths = np.arange(count) * times, np.full(count, times)
    split = Split(tokens=tokens.astype(np.uint16).ravel(), starts=starts, lengths=lengths)
    rows = Rows(split, seq_len=16, seed=0)
    return SpanRows(rows, told=4, spans=1, start=24, end=25, last=31, seed=0)


def learnt(plan, devices=None, steps=200):
    """Losses on documents of one token many times; and the loss on random ones."""
    draw = np.random.default_rng(0)
    rows = span_rows(np.broadcast_to(draw.integers(0, 8, (160, 1)), (160, 16)))
    noise = span_rows(draw.integers(0, 8, (160, 16)))
    sizes = {"vocab": 32, "embed": 32, "layers": 1, "decoder_layers": 1, "heads": 2, "head_dim": 16}
    config = T5Config(**sizes, mlp=32, max_seq=32, tied=False, init_std=0.15)
    state, step = boost(
        maker(config),
        adamw(0.01, b2=0.95),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for number in range(steps):
        state, told = step(state, stack_rows(rows, range(16 * number, 16 * number + 16)))
        found.append(float(told["loss"]))
    total, weight = step.evaluate(state, stack_rows(noise, range(16)))["cross_entropy"]
    return np.array(found), float(total / weight)


@pytest.mark.catches("decoder-reads-no-source")
@pytest.mark.parametrize(
    ("mesh", "devices"), [({"data": 1}, 1), pytest.param(MESH, 8, marks=pytest.mark.sweep)]
)
def test_a_decoder_learns_from_what_its_encoder_read(mesh, devices):
    """What a span holds stands in the source alone; the first of its tokens tells the others.

    One of six numbers that are written, it costs ln 8 where the source is not read, and nothing
    where it is. A model that saw what it is to write would know noise too.
    """
    found, noise = learnt(Plan(mesh=mesh), devices)
    assert found[-5:].mean() < 0.5 * np.log(8) / 6
    assert noise > 0.5 * np.log(8), "else it sees what it is to write"


TINY = smaller(
    CONFIG,
    {
        "model": {
            "vocab": 400,
            "embed": 96,
            "layers": 2,
            "decoder_layers": 2,
            "heads": 4,
            "mlp": 192,
        },
        "data": {"tokenizer_vocab": 380, "seq_len": 64, "global_batch": 32},
        "optimizer": {"peak_lr": 3e-3, "warmup": 20},
    },
)
"""`t5_stdlib` with a tenth of the work."""

BAR_NATS = 0.8
"""Below the entropy of single tokens, of the validation loss after 200 steps of 2,048 tokens."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_on_real_text_reaches_its_bar_on_a_mixed_mesh(tmp_path):
    config = TINY.replace(steps=200, validate_every=100, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_loss"] < final["unigram_entropy"] - BAR_NATS
    assert final["validation_loss"] > final["unigram_entropy"] / 3


MESHES = [MESH, {"fsdp": 4, "ulysses": 2}, {"data": 2, "tensor": 4}]


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_sees_the_same_spans(tmp_path, monkeypatch):
    """Two steps on each mesh after another are six of a run that nobody touched; then it writes."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    check_resumed(TINY, MESHES, tmp_path, tokenizer_vocab=300)
    told = open_checkpoint(tmp_path / "parts").load().generator(slots=20)
    assert len(told.generate([0], source=[5, 6, 7, 399], max_tokens=5).tokens) <= 5
