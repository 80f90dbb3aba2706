"""Items asked of a small model, and what plain passes over whole texts say of them."""

import functools

import jax
import numpy as np

from colossax.evaluation import Benchmark, Examination, Reader
from colossax.inference import several
from colossax.models import LlamaConfig
from tests.inference.test_generator import GROUPED, build, single
from tests.serve.fake import TOKENIZER, VOCAB

SLOTS = 128
CONFIG = LlamaConfig(**{**GROUPED, "vocab": VOCAB, "max_seq": SLOTS})
READER = Reader(tokenizer=TOKENIZER, slots=SLOTS)


def examined(items, bound=None, reader=READER, eos=None):
    """What came of items, and the engines' counts."""
    bound = bound or single()
    exam = Examination([Benchmark(name="one", items=tuple(items), metric="accuracy")], reader)
    spec, params = build(CONFIG, bound)
    run = several(spec, bound, params, requests=exam.requests, eos=eos)
    result = exam.results(run.run(over=exam.over))["one"]
    return result, run.stats.scheduler


@functools.cache
def forward():
    """Logits of a whole pass, `[s, v]`; later tokens change nothing before them."""
    spec, params = build(CONFIG, single())
    run = jax.jit(lambda params, tokens: spec.merge(params)(tokens)[0])

    def logits(tokens):
        padded = np.zeros((1, SLOTS), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(params, padded))[: len(tokens)]

    return logits


@functools.cache
def logprobs(tokens):
    """Of each token but the first, behind those before it, in float64."""
    logits = forward()(tokens).astype(np.float64)[:-1]
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [float(row[token]) for row, token in zip(each, tokens[1:], strict=True)]


def scored(tokens, begin):
    """Those from one on."""
    return logprobs(tuple(tokens))[begin - 1 :]
