"""Grammars: what may come, and schemas that are none."""

import json

import numpy as np
import pytest

from colossax.errors import InputError
from colossax.serve import Grammars, ServeOptions
from colossax.serve.options import Limits
from tests.serve.fake import GRAMMARS, TOKENIZER, VOCAB, FakeEngine
from tests.serve.site import error_of, events, site

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def asked(schema, **more):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {
        "model": "toy",
        "prompt": "a",
        "seed": 1,
        "max_tokens": 200,
        "response_format": form,
    } | more


def allowed(constraint):
    mask = constraint.mask()
    assert mask.dtype == np.uint32 and mask.shape == (-(-VOCAB // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.catches("mask-one-token-late")
def test_a_mask_has_the_tokens_that_may_come():
    constraint = GRAMMARS.constraint(GRAMMARS.compiled('{"enum":["ab","ac"]}'))
    for said in ('"', "a"):
        tokens = TOKENIZER.encode(said)
        assert allowed(constraint) == set(tokens) and not constraint.can_end
        constraint.took(tokens[0])
    assert allowed(constraint) == set(TOKENIZER.encode("bc"))
    with pytest.raises(InputError, match="cannot come here; sample by the mask"):
        constraint.took(TOKENIZER.encode("d")[0])


def test_at_the_end_only_the_end_may_come():
    constraint = GRAMMARS.constraint(GRAMMARS.compiled('{"type":"null"}'))
    for token in TOKENIZER.encode("null"):
        assert token in allowed(constraint)
        constraint.took(token)
    assert allowed(constraint) == {TOKENIZER.eos} and constraint.can_end
    constraint.took(TOKENIZER.eos)


def test_constraints_of_one_grammar_are_apart():
    grammar = GRAMMARS.compiled('{"enum":["ab"]}')
    first, second = GRAMMARS.constraint(grammar), GRAMMARS.constraint(grammar)
    first.took(TOKENIZER.encode('"')[0])
    assert allowed(second) == set(TOKENIZER.encode('"'))


@pytest.mark.catches("grammar-not-handed-on")
def test_what_is_said_is_of_the_schema():
    with site(FakeEngine) as here:
        for seed in range(3):
            told = here.ask("/v1/completions", asked(PERSON, prompt="a" * (seed + 1))).json()
            value = json.loads(told["choices"][0]["text"])
            assert set(value) == {"name", "age", "kind"} and value["kind"] in ("a", "b")
            assert 0 <= value["age"] <= 99 and len(value["name"]) <= 4
            assert told["choices"][0]["finish_reason"] == "stop"
            assert here.engine.asked[-1].waits
        chunks = events(here.ask("/v1/completions", asked(PERSON, stream=True)).text)
        assert json.loads("".join(chunk["choices"][0]["text"] for chunk in chunks))
        told = here.ask(
            "/v1/completions", asked({}, response_format={"type": "json_object"}, max_tokens=400)
        ).json()
        assert isinstance(json.loads(told["choices"][0]["text"]), dict)


@pytest.mark.catches("schema-passed-over")
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "http://127.0.0.1/x"}, "does not fetch resources"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch resources"),
        ({"$ref": "#/$defs/nothing"}, ""),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, ""),
    ],
)
def test_a_schema_that_is_none_is_refused(schema, why):
    with site(FakeEngine) as here:
        error = error_of(here.ask("/v1/completions", asked(schema)), 400)
        assert error["param"] == "response_format"
        assert error["message"].startswith("response_format: no grammar can be made of it (")
        assert why in error["message"] and len(error["message"]) < 500
        assert not here.engine.asked


def nested(depth):
    value = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


BOMBS = {
    "deep": nested(70),
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    "powers": {
        "$defs": {
            f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 8}
            for i in range(20)
        }
        | {"d20": {"type": "string"}},
        "$ref": "#/$defs/d0",
    },
    "repeats": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
    "alternatives": {
        "type": "string",
        "pattern": "|".join(f"(a|b)*a(a|b){{{i}}}" for i in range(60)),
    },
    "items": {"type": "array", "items": nested(5), "minItems": 10**9},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_schema_that_would_take_everything_ends(bomb):
    """It is refused or done within the time; whoever asks next is answered."""
    with site(FakeEngine, ServeOptions(limits=Limits(grammar_s=3.0))) as here:
        answer = here.ask("/v1/completions", asked(BOMBS[bomb], max_tokens=4))
        assert answer.status_code == 200 or error_of(answer, 400)
        assert here.ask("/v1/completions", asked(PERSON)).status_code == 200


def test_the_size_of_a_schema_is_limited():
    with site(FakeEngine, ServeOptions(limits=Limits(schema_bytes=300))) as here:
        error = error_of(here.ask("/v1/completions", asked({"enum": ["a" * 400]})), 400)
        assert "bytes; give at most 300" in error["message"]


def test_a_vocabulary_may_be_larger_than_the_tokenizer():
    grammars = Grammars(TOKENIZER, 300, (TOKENIZER.eos,))
    constraint = grammars.constraint(grammars.compiled('{"enum":["a"]}'))
    mask = constraint.mask()
    assert mask.shape == (10,) and mask[9] == 0
