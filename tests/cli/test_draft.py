"""`--draft` of `colossax generate`: who may guess, and that no guess changes a token."""

import json
import re

import pytest

from colossax.cli import main
from tests.launching import write_text

pytestmark = pytest.mark.slow

BASE = (
    "llama_tiny --model.layers=2 --model.embed=32 --model.mlp=48 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=32"
    " --data.global_batch=8 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
    " --steps=1 --devices=1 --validate-every=0"
).split()
RUNS = {
    "mine": [],
    "small": ["--model.layers=1"],
    "tokens": ["--model.layers=1", "--data.tokenizer_vocab=280"],
    "vocabulary": ["--model.layers=1", "--model.vocab=320"],
}
ASKS = ["--prompt=the d", "--prompt=ab ab ab", "--max-tokens=20", "--json", "--devices=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, those that may guess for it, and those that may not."""
    folder = tmp_path_factory.mktemp("draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        for name, words in RUNS.items():
            assert main(["train", *BASE, text, *words, f"--out={name}"]) == 0
        beside = ["glide_tiny", *BASE[1:], text, "--init=mine", "--out=drafter"]
        assert main(["train", *beside]) == 0
        yield folder


def said(capsys, *words):
    capsys.readouterr()
    assert main(["generate", "mine", *ASKS, *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_whoever_guesses_the_same_is_said(folder, capsys):
    expected = said(capsys)
    assert len(expected) == 2
    for words in (["ngrams"], ["drafter"], ["small", "--draft-tokens=2", "--draft-nodes=5"]):
        assert said(capsys, "--draft", *words) == expected
    for who in ("retrieval", "retrieval+ngrams", "retrieval+small"):
        assert said(capsys, f"--draft={who}", "--draft-pages=3") == expected
    drawn = ["--temperature=1", "--seed=5"]
    assert said(capsys, *drawn, "--draft=small") == said(capsys, *drawn) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mine", "--draft=tokens"], "'tokens' has another tokenizer than the model it is to"),
        (["mine", "--draft=vocabulary"], "the drafting model has 320 tokens and .* for 300; draft"),
        (["small", "--draft=drafter"], "is a drafter of '.*mine.*whose parameters differ; give"),
        (["mine", "--draft=nowhere"], "checkpoint directory 'nowhere' does not exist"),
    ],
)
def test_who_cannot_guess_for_a_model_is_refused(folder, words, sentence, capfd):
    assert main(["generate", *words, *ASKS]) == 2
    err = capfd.readouterr().err
    assert re.search(sentence, err) and "Traceback" not in err


@pytest.mark.catches("guesses-of-nobody")
@pytest.mark.catches("pages-of-nobody")
@pytest.mark.parametrize("verb", ["generate", "serve"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--draft-tokens=3"], "--draft-tokens: nobody guesses; give --draft ngrams or a CHECKP"),
        (["--draft-nodes=3"], "--draft-nodes: nobody guesses; give --draft ngrams or a CHECKPOI"),
        (["--draft=ngrams", "--draft-nodes=9"], "--draft-nodes: n-grams guess one line of tokens"),
        (["--draft=retrieval", "--draft-nodes=9"], "--draft-nodes: retrieval guesses one line"),
        (["--draft=retrieval+"], "--draft: found 'retrieval+', and nobody behind the plus; give"),
        (["--draft=ngrams", "--draft-pages=9"], "--draft-pages: nobody finds pages; give --draft"),
        (["--draft-pages=9"], "--draft-pages: nobody finds pages; give --draft retrieval too"),
    ],
)
def test_counts_of_what_nobody_guesses_are_refused(verb, words, sentence, capfd):
    """Before a checkpoint is looked for."""
    asks = ASKS if verb == "generate" else []
    assert main([verb, "nowhere", *asks, *words]) == 2
    assert sentence in capfd.readouterr().err
