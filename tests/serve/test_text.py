"""The pieces of a continuation are its text, however it is cut."""

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from colossax.data import Tokenizer
from colossax.serve.text import (
    HELD_TOKENS,
    ByteDetokenizer,
    ContextDetokenizer,
    StopFinder,
    Telling,
    detokenizer,
)
from tests.serve.fake import TOKENIZER

TEXTS = [
    "plain",
    "h\N{LATIN SMALL LETTER E WITH ACUTE}llo",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{RAINBOW}\N{VARIATION SELECTOR-16}",
    "\N{REGIONAL INDICATOR SYMBOL LETTER D}\N{REGIONAL INDICATOR SYMBOL LETTER E}",
    "a\N{REPLACEMENT CHARACTER}b",
    "\u4f60\u597d \U0001f9d1\u200d\U0001f4bb",
]


def pieces_of(reader, tokens):
    return [*(reader.push(token) for token in tokens), reader.finish()]


def sentencepiece_like():
    """As Llama's first tokenizer: words begin with a mark, other characters are bytes."""
    words = ["\u2581Hello", "\u2581", "world", "\u2581world", "!", "\u2581a"]
    vocab = {"</s>": 0} | {word: i + 1 for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(definition=backend.to_str(), end="</s>")


SPLIT, BYTES = sentencepiece_like(), 7


def test_the_kind_of_a_tokenizer_is_seen():
    assert isinstance(detokenizer(TOKENIZER), ByteDetokenizer)
    assert isinstance(detokenizer(SPLIT), ContextDetokenizer)


@pytest.mark.catches("half-a-character-is-said")
@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_several_tokens_are_said_whole(text):
    for reader in (ByteDetokenizer(TOKENIZER), ContextDetokenizer(TOKENIZER)):
        pieces = pieces_of(reader, TOKENIZER.encode(text))
        assert "".join(pieces) == text
        assert all(piece in text for piece in pieces)


TOKENS = st.lists(st.integers(0, 271), max_size=40)
"""Some are of the model's vocabulary and not of the tokenizer's."""


@pytest.mark.catches("bytes-not-as-the-tokenizer")
@hypothesis.settings(max_examples=200)
@hypothesis.given(TOKENS)
def test_pieces_are_what_the_tokenizer_makes_of_all_tokens(tokens):
    assert "".join(pieces_of(ByteDetokenizer(TOKENIZER), tokens)) == TOKENIZER.decode(tokens)


WORDS = st.lists(st.integers(1, 6), max_size=12)


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.one_of(WORDS, st.sampled_from(TEXTS)), max_size=4))
def test_pieces_of_words_and_bytes_are_what_the_tokenizer_makes_of_them(parts):
    tokens = []
    for part in parts:
        if isinstance(part, str):
            # A word between two characters: their bytes are read apart.
            tokens += [3, *(BYTES + byte for byte in part.encode()), 3]
        else:
            tokens += part
    assert "".join(pieces_of(ContextDetokenizer(SPLIT), tokens)) == SPLIT.decode(tokens)


def test_the_space_before_a_first_word_is_none():
    assert pieces_of(ContextDetokenizer(SPLIT), [1, 4, 5]) == ["Hello", " world", "!", ""]


def test_bytes_that_never_make_a_character_are_said_in_the_end():
    reader = ContextDetokenizer(TOKENIZER)
    (broken,) = TOKENIZER.encode("\N{REPLACEMENT CHARACTER}")[:1]
    told = [reader.push(broken) for _ in range(3 * HELD_TOKENS)]
    assert sum(map(len, told)) == 3 * HELD_TOKENS


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(text, stops):
    """The slow truth."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@pytest.mark.catches("stop-kept-too-short")
@pytest.mark.catches("stop-in-the-text")
@hypothesis.settings(max_examples=500)
@hypothesis.given(st.lists(st.text("abc", max_size=3), max_size=10), STOPS)
def test_text_is_cut_before_the_first_stop(parts, stops):
    """The first that a reader of one character after another would see."""
    text, finder = "".join(parts), StopFinder(stops)
    said = "".join(map(finder.push, text))
    said += "" if finder.found else finder.finish()
    assert finder.found == any(stop in text for stop in stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert said == cut(text[: min(ends, default=len(text))], stops)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(st.text("abc", max_size=3), max_size=10), STOPS)
def test_nothing_is_said_that_a_stop_could_begin_with(parts, stops):
    finder, said = StopFinder(stops), ""
    for part in parts:
        said += finder.push(part)
        assert not any(stop in said for stop in stops)
    said += "" if finder.found else finder.finish()
    assert "".join(parts).startswith(said)
    assert finder.found == any(stop in "".join(parts) for stop in stops)


def told(tokens, stops=()):
    telling, found = Telling(TOKENIZER, stops), []
    for token in tokens:
        found.append(telling.push(token, -1.0))
        if telling.stopped:
            break
    return [*found, telling.finish()]


@pytest.mark.catches("token-of-a-stop-is-told")
def test_tokens_are_told_once_with_the_text_they_are_of():
    tokens = TOKENIZER.encode("a\N{GRINNING FACE}b END c")
    found = told(tokens, ["END"])
    assert "".join(text for text, _ in found) == "a\N{GRINNING FACE}b "
    entries = [entry for _, some in found for entry in some]
    assert [entry.token for entry in entries] == TOKENIZER.encode("a\N{GRINNING FACE}b ")
    assert [entry.offset for entry in entries] == [0, 1, 1, 1, 1, 2, 3]


@hypothesis.settings(max_examples=200)
@hypothesis.given(TOKENS)
def test_without_a_stop_all_tokens_are_told_in_order(tokens):
    found = told(tokens)
    assert [entry.token for _, some in found for entry in some] == tokens
    assert "".join(text for text, _ in found) == TOKENIZER.decode(tokens)
