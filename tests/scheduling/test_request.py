"""What no engine can continue is refused, by one sentence."""

import dataclasses

import numpy as np
import pytest

from colossax import inference, scheduling
from colossax.errors import InputError
from colossax.scheduling import EngineRequest, Reads, SamplingConfig, Seen

FIELDS = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 2**32 - 1,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": tuple((i, -100.0) for i in range(300)),
    "logprobs": 20,
}


def request(**fields):
    sampling = {name: fields.pop(name) for name in tuple(fields) if name in FIELDS}
    return EngineRequest(
        **{"prompt": (1, 2, 3), "max_tokens": 4, **fields}, sampling=SamplingConfig(**sampling)
    )


def test_all_that_there_is_is_taken():
    request().check(vocab=300, slots=7)
    request(**FIELDS, generated=(1, 2, 3), ends=(0, 299)).check(vocab=300, slots=7)
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingConfig)}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ()}, "^prompt: it is empty; give at least one token to continue$"),
        ({"prompt": (1, 300)}, "^prompt: token 300 is outside the vocabulary of 300; use ids from"),
        ({"prompt": (1,) * 7}, "^prompt: it has 7 tokens, and at most 6 leave room for a next one"),
        ({"max_tokens": 5}, "^max_tokens: a prompt of 3 and 5 more make 8 tokens, above .* of 7;"),
        ({"max_tokens": 0}, "^max_tokens: found 0; give 1 or more$"),
        ({"generated": (1, -1)}, "^generated: token -1 is outside the vocabulary of 300; use ids"),
        (
            {"generated": (1,) * 4},
            "^generated: it has 4 tokens, and max_tokens is 4, so none are left to say; ask for",
        ),
        ({"ends": (1, 300)}, "^ends: token 300 is outside the vocabulary of 300; use ids from 0"),
        ({"temperature": -0.5}, r"^temperature: found -0.5; give 0 \(greedy\) or more$"),
        ({"top_k": -1}, "^top_k: found -1; give 0 or more$"),
        ({"top_p": 0.0}, "^top_p: found 0.0; give a number above 0, at most 1$"),
        ({"top_p": 1.01}, "^top_p: found 1.01; give a number above 0, at most 1$"),
        ({"min_p": 1.5}, "^min_p: found 1.5; give 0 to 1$"),
        ({"seed": 2**32}, "^seed: found 4294967296; give 0 to 4294967295$"),
        ({"presence_penalty": 2.1}, "^presence_penalty: found 2.1; give -2 to 2$"),
        ({"frequency_penalty": -2.1}, "^frequency_penalty: found -2.1; give -2 to 2$"),
        ({"score_from": 0}, "^score_from: found 0; give 1 or more$"),
        (
            {"score_from": 1},
            "^score_from: tells log-probabilities; give sampling.logprobs too$",
        ),
        ({"logprobs": 21}, "^logprobs: found 21; give 0 to 20$"),
        ({"logit_bias": ((300, 1.0),)}, "^logit_bias: token 300 is outside the vocabulary of 300"),
        ({"logit_bias": ((1, 1.0),) * 301}, "^logit_bias: found 301 tokens; give at most 300$"),
        (
            {"logit_bias": ((7, float("nan")),)},
            "^logit_bias: found nan for token 7, which is not finite; give a number$",
        ),
    ],
)
@pytest.mark.catches("penalties-without-bounds")
@pytest.mark.catches("biases-without-end")
def test_what_is_out_of_bounds_is_refused(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        request(**fields).check(vocab=300, slots=7)


def test_generation_and_engine_say_the_same_sentences():
    assert inference.check_tokens is scheduling.check_tokens
    assert inference.check_length is scheduling.check_length


def test_places_of_images_have_no_probability():
    sight = Seen(shape=(2, 2, 1), places=1, square=(2, 2))
    one = request(prompt=(300, 1), images=np.zeros((1, 2, 2, 1)), score_from=1, logprobs=1)
    with pytest.raises(InputError, match="^score_from: places of images are no tokens that have"):
        one.check(vocab=300, slots=7, reads=Reads(sight=sight))
