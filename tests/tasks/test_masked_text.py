"""Text whose masked tokens an encoder tells: the task, its refusals, and that it learns."""

import dataclasses

import numpy as np
import pytest

from colossax import Plan, boost
from colossax.data import MaskedRows, Rows, Split, Tokenizer, stack_rows
from colossax.errors import InputError
from colossax.models import BERTConfig, maker
from colossax.nn import HeadConfig
from colossax.optim import adamw
from colossax.recipes import recipe
from colossax.tasks import MaskConfig, masked_token_loss, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.views import mask_token
from tests.launching import write_text
from tests.tasks.small_text import changed, check_resumed, ran, smaller

CONFIG = recipe("bert_stdlib")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_it_goes_through_json_and_back():
    config = changed(CONFIG, "data", masking=MaskConfig(rate=0.3, random=0.0))
    assert train_config_from_json(train_config_to_json(config)) == config


@pytest.mark.catches("masks-are-no-identity")
def test_what_is_masked_is_part_of_which_run_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    path = str(write_text(tmp_path / "text", documents=4))
    small = changed(CONFIG, "data", path=path, tokenizer_vocab=300)
    other = changed(CONFIG, "data", path=path, tokenizer_vocab=300, masking=MaskConfig(rate=0.3))
    assert task_of(small).identity()["data.masking"] == "0.15, 0.1 any, 0.1 kept"
    assert task_of(other).identity()["data.masking"] == "0.3, 0.1 any, 0.1 kept"
    assert ", 30% masked" in task_of(other).introduction()[0]
    assert task_of(small).unit == "nats per masked token"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: MaskConfig(rate=0.0),
            r"data.masking.rate: found 0.0; give a share above 0, below",
        ),
        (
            lambda: MaskConfig(rate=1.0),
            r"data.masking.rate: found 1.0; give a share above 0, below",
        ),
        (lambda: MaskConfig(random=0.6, kept=0.5), "random 0.6 and kept 0.5 are shares of the tok"),
        (
            lambda: changed(CONFIG, "data", masking=None),
            "data.masking: the model sees the next token, whi",
        ),
        (
            lambda: CONFIG.replace(model=dataclasses.replace(recipe("llama_tiny").model)),
            "data.masking: the model's attention is causal, so a masked token would be told by",
        ),
        (
            lambda: changed(CONFIG, "sample", prompt="def "),
            "sample.prompt: the model's attention is not",
        ),
        (
            lambda: changed(CONFIG, "model", head=HeadConfig(outputs=2, pool="first")),
            "model.head: a run on text trains logits of the vocabulary, and the model has another",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


def tokenizer(tmp_path, *, mask=None):
    """One of 257 tokens, with a mask or without."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    special = ["<|endoftext|>", *([] if mask is None else [mask])]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_file(tmp_path)


@pytest.mark.catches("mask-is-a-token-of-text")
def test_the_mask_is_the_tokenizers_own_or_the_first_number_behind_its_tokens(tmp_path):
    assert mask_token(tokenizer(tmp_path, mask="[MASK]"), 258) == 1
    plain = tokenizer(tmp_path)
    assert mask_token(plain, 258) == 257
    with pytest.raises(InputError, match="has 257 tokens, none of them for what is masked, and"):
        mask_token(plain, 257)


def masked_rows(tokens):
    """Of documents `[count, times]`, a third of each masked."""
    count, times = tokens.shape
    starts, lengths = np.arange(count) * times, np.full(count, times)
    split = Split(tokens=tokens.astype(np.uint16).ravel(), starts=starts, lengths=lengths)
    return MaskedRows(Rows(split, seq_len=32, seed=0), mask=23, vocab=23, seed=0, rate=0.3)


def learnt(plan, steps=40):
    """What is told of each step on documents of one token many times; the loss on random ones."""
    draw = np.random.default_rng(0)
    rows = masked_rows(np.broadcast_to(draw.integers(0, 23, (160, 1)), (160, 16)))
    noise = masked_rows(draw.integers(0, 23, (160, 16)))
    sizes = {"vocab": 24, "embed": 32, "layers": 1, "heads": 2, "mlp": 32, "max_seq": 32}
    state, step = boost(
        maker(BERTConfig(**sizes, init_std=0.2)), adamw(0.01), masked_token_loss(), plan
    )
    found = []
    for number in range(steps):
        state, told = step(state, stack_rows(rows, range(16 * number, 16 * number + 16)))
        found.append([float(told[name]) for name in ("loss", "masked", "tokens")])
    total, weight = step.evaluate(state, stack_rows(noise, range(16)))["cross_entropy"]
    return np.array(found), float(total / weight)


@pytest.mark.catches("encoder-sees-what-it-tells")
def test_an_encoder_learns_from_what_stands_around():
    """Far below ln 23, which frequencies alone give; and far above where nothing tells a token."""
    found, noise = learnt(Plan(mesh=MESH))
    assert found[-5:, 0].mean() < 0.4 * np.log(23)
    assert noise > 0.9 * np.log(23), "else it sees what it is to tell"
    assert (np.abs(found[:, 1] - 0.3) < 0.1).all() and (found[:, 2] == 512).all()


TINY = smaller(
    CONFIG,
    {
        "model": {"vocab": 384, "embed": 96, "layers": 2, "heads": 4, "mlp": 256},
        "data": {"tokenizer_vocab": 383, "seq_len": 64, "global_batch": 32},
        "optimizer": {"peak_lr": 3e-3, "warmup": 20},
    },
)
"""`bert_stdlib` with a tenth of the work."""

BAR_NATS = 0.3
"""Below the entropy of single tokens, of the validation loss after 200 steps of 2,048 tokens."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_on_real_text_reaches_its_bar_on_a_mixed_mesh(tmp_path):
    """And no more than text allows: a model that saw what it is to tell would reach 0."""
    config = TINY.replace(steps=200, validate_every=100, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_loss"] < final["unigram_entropy"] - BAR_NATS
    assert final["validation_loss"] > final["unigram_entropy"] / 2


MESHES = [MESH, {"fsdp": 2, "ring": 2, "tensor": 2}, {"stage": 2, "fsdp": 4}]


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_sees_the_same_masks(tmp_path, monkeypatch):
    """Two steps on each mesh after another are six of a run that nobody touched."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    check_resumed(TINY, MESHES, tmp_path)
