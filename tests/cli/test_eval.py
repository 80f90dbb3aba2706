"""`colossax eval`: questions with choices, and what is refused."""

import json

import pytest

from colossax.cli import main
from tests.cli.test_draft import BASE
from tests.launching import write_text

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": "the d", "choices": [" of", "og ran", "oor"], "answer": 2},
    {"prompt": "ab ab ab", "choices": [" ab", " zzzz"], "answer": 0},
    {"prompt": "", "choices": ["a", "qqqq"], "answer": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and questions."""
    folder = tmp_path_factory.mktemp("eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        assert main(["train", *BASE, text, "--out=mine"]) == 0
        (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        yield folder


def told(capsys, *words):
    capsys.readouterr()
    assert main(["eval", "mine", "asked.jsonl", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.catches("eval-on-paper")
def test_a_share_is_told_for_people_and_for_programs(folder, capsys):
    rating = json.loads(told(capsys, "--json", "--devices=1"))
    assert set(rating) == {"questions", "accuracy", "accuracy_norm", "stderr", "stderr_norm"}
    assert rating["questions"] == 3 and rating["accuracy"] in (0, 1 / 3, 2 / 3, 1)
    line = told(capsys, "--devices=1")
    assert line.startswith(f"3 questions: accuracy {rating['accuracy']:.4f} ± ")


def test_refusals(folder, capsys):
    (folder / "bad.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"prompt": 1}\n')
    for words, message in (
        (["bad.jsonl"], "FILE: bad.jsonl, line 2: has the fields prompt; give prompt, choices and"),
        (["none.jsonl"], "FILE: none.jsonl cannot be read"),
    ):
        assert main(["eval", "mine", *words, "--devices=1"]) == 2
        assert message in capsys.readouterr().err
