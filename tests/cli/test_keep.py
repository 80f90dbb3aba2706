"""`--keep` of `colossax generate`: what of each sequence is kept, and that it is said."""

import json

import pytest

from colossax.cli import main
from colossax.inference import open_checkpoint
from colossax.scheduling import EngineRequest, Keep
from tests.cli.test_draft import BASE
from tests.launching import write_text

ASKS = ["--prompt=the day that was long before it ended ab ab ab", "--max-tokens=30", "--json"]


@pytest.mark.slow
@pytest.mark.catches("generate-keeps-all")
def test_it_says_what_an_engine_says(tmp_path, monkeypatch, capsys):
    """With what is kept in the answer."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = f"--data={write_text(tmp_path / 'text')}"
    assert main(["train", *BASE, text, "--model.init_std=0.4", "--out=mine"]) == 0

    def said(*words):
        capsys.readouterr()
        assert main(["generate", "mine", *ASKS, "--devices=1", *words]) == 0
        return json.loads(capsys.readouterr().out)

    whole = said()
    assert "keep" not in whole
    for words, keep in {
        "heavy=16,window=16": Keep(heavy=16, window=16),
        "window=16": Keep(window=16),
    }.items():
        found = said(f"--keep={words}")
        assert found["keep"] == keep.named and found["tokens"] != whole["tokens"]
        loaded = open_checkpoint("mine").load()
        one = loaded.engine(seats=2, keeps=keep.kind)
        prompt = tuple(found["prompt_tokens"])
        ends = () if loaded.eos is None else (loaded.eos,)
        asked = EngineRequest(prompt=prompt, max_tokens=30, ends=ends, keep=keep)
        (told,) = one.generate_all([asked])
        assert [x.token for x in told] == found["tokens"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("heavy", "--keep: found 'heavy'; give window=1024 with sinks=4 or heavy=512, each"),
        ("window=2,window=3", "--keep: found 'window=2,window=3'; give window=1024 with"),
        ("last=3", "--keep: found 'last=3'; give window=1024"),
        ("sinks=4", "--keep: found 'sinks=4' without a window; give window=1024"),
        ("window=0", "keep.window: found 0; give 1 or more"),
        ("heavy=0,window=8", "--keep: found 'heavy=0,window=8'; give heavy 1 or more"),
        (f"window={'9' * 5000}", "give window=1024 with sinks=4 or heavy=512"),
        ("sinks=4,heavy=8,window=8", "keep: found sinks 4 and heavy 8; give one of them"),
    ],
)
def test_what_says_nothing_is_refused(words, sentence, capfd):
    """Before a checkpoint is looked for."""
    assert main(["generate", "nowhere", *ASKS, f"--keep={words}"]) == 2
    assert sentence in capfd.readouterr().err
