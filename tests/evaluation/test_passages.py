"""Perplexities are those of whole passes over each window."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import InputError
from colossax.evaluation import PassageItem
from colossax.evaluation.passages import windows
from tests.evaluation.examined import READER, SLOTS, examined, scored
from tests.serve.fake import TOKENIZER


@pytest.mark.catches("windows-overlap")
@given(st.integers(1, 300), st.integers(2, 40), st.data())
def test_windows_score_each_token_once(count, room, data):
    context = data.draw(st.integers(1, room - 1))
    tokens, told = list(range(count)), []
    for number, (row, begin) in enumerate(windows(tokens, [-1], room, context)):
        assert len(row) <= room and 0 < begin < len(row)
        assert begin >= context or number == 0, "what is read before"
        assert row == [-1, *tokens][row[0] + 1 :][: len(row)], "as it stands in the text"
        told += row[begin:]
    assert told == tokens


TEXT = "a text of some words, ä too; " * 9


@pytest.mark.catches("passages-by-characters")
@pytest.mark.parametrize("context", [1, 40])
def test_a_text_is_scored_as_whole_passes_score_its_windows(context):
    result, _ = examined([PassageItem(text=TEXT, where="here", context=context)])
    rows = windows(TOKENIZER.encode(TEXT), [TOKENIZER.eos], SLOTS - 1, context)
    nats = -math.fsum(one for row in rows for one in scored(*row))
    (record,) = result.records
    np.testing.assert_allclose(record["logprob"], -nats, rtol=1e-5)
    expected = {
        "bits_per_byte": nats / len(TEXT.encode()) / math.log(2),
        "byte_perplexity": math.exp(nats / len(TEXT.encode())),
        "token_perplexity": math.exp(nats / len(TOKENIZER.encode(TEXT))),
        "word_perplexity": math.exp(nats / (len(TEXT.split()) + 1)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(result.scores[name].value, value, rtol=1e-4)


def test_of_several_texts_all_bytes_count_alike():
    texts = ["short", TEXT[:100]]
    result, _ = examined([PassageItem(text=one, where="here") for one in texts])
    nats = -sum(one["logprob"] for one in result.records)
    found = result.scores["bits_per_byte"]
    np.testing.assert_allclose(
        found.value, nats / math.log(2) / sum(len(t.encode()) for t in texts)
    )


@pytest.mark.catches("text-of-nothing")
def test_what_has_no_window_is_refused():
    for context in (SLOTS - 1, SLOTS + 40):
        with pytest.raises(
            InputError, match=f"^--context: found {context}, and a window has 127 to"
        ):
            PassageItem(text=TEXT, where="here", context=context).asked(READER)
    assert PassageItem(text=TEXT, where="here", context=SLOTS - 2).asked(READER).requests
    with pytest.raises(InputError, match="^here: holds no text; leave it out$"):
        PassageItem(text="", where="here").asked(READER)
