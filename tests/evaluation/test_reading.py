"""What stands before texts is what the tokenizer's file puts there."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from colossax.evaluation import ChoiceItem, Prompt, Reader
from tests.serve.fake import TOKENIZER

BEGIN = TOKENIZER.specials["<|im_start|>"]


def framing(single):
    """The tokenizer with a file that puts tokens around texts."""
    backend = Backend.from_str(TOKENIZER.definition)
    tokens = [("<|im_start|>", BEGIN), ("<|endoftext|>", TOKENIZER.eos)]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return dataclasses.replace(TOKENIZER, definition=json.dumps(json.loads(backend.to_str())))


@pytest.mark.catches("nothing-before-a-text")
@pytest.mark.parametrize("single", ["<|im_start|> $A", "<|im_start|> $A <|endoftext|>"])
def test_a_token_that_begins_documents_is_before_every_text(single):
    reader = Reader(tokenizer=framing(single), slots=64)
    assert reader.begin == reader.nothing == (BEGIN,)
    item = ChoiceItem(prompt=Prompt(text="ab"), choices=(" c", "d"), answer=0, where="here")
    first, second = item.asked(reader).requests
    assert first.prompt == (BEGIN, *TOKENIZER.encode("ab c")) and first.score_from == 3
    assert second.prompt == (BEGIN, *TOKENIZER.encode("abd"))
    item = ChoiceItem(prompt=Prompt(text=""), choices=("c", "d"), answer=0, where="here")
    first, _ = item.asked(reader).requests
    assert first.prompt == (BEGIN, *TOKENIZER.encode("c")) and first.score_from == 1
    item = ChoiceItem(prompt=Prompt(text="x" * 99), choices=("c", "d"), answer=0, where="here")
    first, _ = item.asked(reader).requests
    assert first.prompt == (BEGIN, *TOKENIZER.encode("x" * 61 + "c")) and first.score_from == 62


@pytest.mark.parametrize("single", ["$A", "$A <|endoftext|>"])
def test_without_one_there_is_nothing_but_before_an_empty_text(single):
    reader = Reader(tokenizer=framing(single), slots=64)
    assert reader.begin == () and reader.nothing == (TOKENIZER.eos,)
