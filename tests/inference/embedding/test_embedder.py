"""An embedder reads each text as if it were alone, for the work of its real tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference import Embedder
from colossax.inference.embedding.program import EmbeddingProgram, sizes_of
from colossax.inference.plan import shapes_of, unrolled
from colossax.models import BERTConfig, LlamaConfig, ModernBERTConfig, RoBERTaConfig, maker
from colossax.nn import HeadConfig, describe
from colossax.planner.counting.traced_flops import traced_flops
from colossax.scheduling.texts import TextQueue
from tests.cases import quick_first
from tests.inference.test_generator import build, single

pytestmark = pytest.mark.slow

LONGEST, VOCAB = 24, 64
SIZES = {"vocab": VOCAB, "embed": 32, "layers": 2, "heads": 4, "mlp": 64, "max_seq": LONGEST}
SIZES |= {"init_std": 0.3}
HEADS = {
    "mean": HeadConfig(pool="mean", normalise=True),
    "first": HeadConfig(pool="first", normalise=True),
    "last": HeadConfig(pool="last"),
    "both": HeadConfig(pool="first_mean"),
}
CONFIGS = {
    "bert": BERTConfig(**SIZES, head=HEADS["mean"]),
    "roberta": RoBERTaConfig(**SIZES, head=HEADS["first"]),
    "modernbert": ModernBERTConfig(**SIZES, window=6, head=HEADS["both"]),
    "llama": LlamaConfig(**SIZES, kv_heads=2, head=HEADS["last"]),
}
BERT = CONFIGS["bert"]
PLANS = {
    "data2 fsdp2 tensor2": Plan(mesh={"data": 2, "fsdp": 2, "tensor": 2}),
    "tensor4 fsdp2": Plan(mesh={"tensor": 4, "fsdp": 2}),
    "fsdp8": Plan(mesh={"fsdp": 8}),
    "ring2 tensor2": Plan(mesh={"ring": 2, "tensor": 2, "data": 2}),
}


def texts(count=30):
    """Of all lengths, the longest among them."""
    noise = np.random.default_rng(5)
    lengths = [LONGEST, 1, *noise.integers(1, LONGEST + 1, count - 2).tolist()]
    return [noise.integers(0, VOCAB, length).tolist() for length in lengths]


@functools.cache
def alone(config):
    """Each text in a row of its own, its hidden states pooled by NumPy in float64."""
    spec, params = build(config, single())

    @jax.jit
    def run(params, tokens, segments):
        with colossax.use(single()):
            return spec.merge(params).hidden(tokens, segments=segments)[0]

    rows = np.zeros((len(texts()), LONGEST), np.int32)
    segments = np.full(rows.shape, -1, np.int32)
    for at, text in enumerate(texts()):
        rows[at, : len(text)], segments[at, : len(text)] = text, 0
    found = []
    for text, hidden in zip(texts(), np.asarray(run(params, rows, segments)), strict=True):
        own = np.asarray(hidden[: len(text)], np.float64)
        rest = own[1:].mean(0) if len(own) > 1 else np.zeros_like(own[0])
        vector = {
            "mean": own.mean(0),
            "first": own[0],
            "last": own[-1],
            "first_mean": np.concatenate([own[0], rest]),
        }[config.head.pool]
        found.append(vector / np.linalg.norm(vector) if config.head.normalise else vector)
    return np.stack(found)


def described(config):
    with colossax.use(single()):
        return describe(maker(config))


def embedder(config=BERT, plan=None, **options):
    bound = single() if plan is None else plan.bind()
    spec, params = build(config, bound)
    return Embedder(spec, bound, params, **{"tokens": 64, **options})


@pytest.mark.catches("texts-of-a-row-meet")
@pytest.mark.catches("positions-go-on")
@pytest.mark.parametrize("name", quick_first(CONFIGS, ["bert", "llama"]))
def test_each_as_if_alone(name):
    config = CONFIGS[name]
    one = embedder(config)
    np.testing.assert_allclose(one.embed(texts()), alone(config), atol=2e-5)
    assert one.width == alone(config).shape[1]
    assert not one.busy and one.stats.tokens == sum(map(len, texts()))


@pytest.mark.catches("replicas-do-not-share")
@pytest.mark.parametrize("name", quick_first(PLANS, ["data2 fsdp2 tensor2"]))
def test_meshes(name):
    """Parts that split a batch have rows of their own."""
    one = embedder(plan=PLANS[name])
    np.testing.assert_allclose(one.embed(texts()), alone(BERT), atol=2e-5)
    mesh = PLANS[name].mesh
    assert one.program.rows == mesh.get("data", 1) * mesh.get("fsdp", 1)
    assert one.stats.places == sum(n * size for size, n in one.stats.steps.items()) * (
        one.program.rows
    )


def test_layers_with_arrays_of_their_own():
    plan = unrolled(Plan(), build(BERT, single())[0])
    bound = plan.bind(jax.devices()[:1])
    spec, params = build(BERT, bound)
    found = Embedder(spec, bound, params, tokens=64).embed(texts())
    np.testing.assert_allclose(found, alone(BERT), atol=2e-5)


def test_a_text_longer_than_usual_steps_has_one_of_its_own_size():
    one = embedder(tokens=16)
    np.testing.assert_allclose(one.embed(texts()), alone(BERT), atol=2e-5)
    assert one.program.sizes == (4, 16, LONGEST) and one.stats.steps[LONGEST]


def test_nothing_is_compiled_after_warm():
    one = embedder()
    one.warm()
    assert one.program.compiled == len(one.program.sizes) == 3
    for text in ([1], [1, 2, 3] * 4, [5] * LONGEST):
        one.embed([text])
    one.embed(texts())
    assert one.program.compiled == 3
    assert one.stats.steps[4] == one.stats.steps[16] == 1


def test_work_is_that_of_real_tokens():
    """Matmuls of all steps against those of texts filled up to the longest, at a usual width."""
    longest, noise = 128, np.random.default_rng(0)
    sizes = {"vocab": VOCAB, "embed": 384, "layers": 2, "heads": 6, "mlp": 1536}
    config = BERTConfig(**sizes, max_seq=longest, head=HEADS["mean"])
    spec = described(config)
    params = shapes_of(spec)

    def flops(program, size):
        return traced_flops(program.traced(size, params).jaxpr).flops

    program = EmbeddingProgram(spec, single(), tokens=512, longest=None)
    most = tuple(program.documents.values())
    queue = TextQueue(sizes=program.sizes, usual=program.usual, most=most)
    lengths = noise.integers(2, longest + 1, 400)
    for number, length in enumerate(lengths.tolist()):
        queue.add(number, length)
    plans = list(iter(queue.next, None))
    assert sum(plan.tokens for plan in plans) == lengths.sum()
    assert lengths.sum() / sum(plan.size for plan in plans) > 0.97
    each = {size: flops(program, size) for size in {plan.size for plan in plans}}
    spent = sum(each[plan.size] for plan in plans)
    padded = flops(EmbeddingProgram(spec, single(), tokens=longest, longest=None), longest)
    share = lengths.mean() / longest
    assert share < 0.55 and spent / (len(lengths) * padded) < 1.2 * share


def test_who_is_given_up_is_not_told_of():
    one = embedder()
    kept, gone, under_way = one.add([1, 2]), one.add([3]), one.add([4] * LONGEST)
    one.cancel(gone)
    began = []
    one.began = began.extend
    told = []
    while one.busy:
        told += [found.number for found in one.step()]
        one.cancel(under_way)
    assert began == [kept, under_way] and told == [kept, under_way][: len(told)]


@pytest.mark.catches("spoilt-spoils-others")
def test_a_text_that_gives_no_numbers_spoils_no_other():
    """NaN in one token's embedding reaches all of its row; who shared it is read again."""
    one = embedder()
    table = jax.tree.map(lambda x: x, one._params)
    table["embed"]["table"] = table["embed"]["table"].at[9].set(jnp.nan)
    one._params = table
    asked = [text for text in texts() if 9 not in text]
    at = [i for i, text in enumerate(texts()) if 9 not in text]
    numbers = [one.add(text) for text in [asked[0], [4, 9, 4], *asked[1:]]]
    found = {}
    while one.busy:
        found |= {each.number: each for each in one.step()}
    bad = found.pop(numbers.pop(1))
    assert bad.vector is None and "NaN" in bad.message
    got = np.stack([found[number].vector for number in numbers])
    np.testing.assert_allclose(got, alone(BERT)[at], atol=2e-5)
    with pytest.raises(InputError, match=r"texts\[1\]: the model gave numbers that are none"):
        one.embed([[3], [9]])
    while one.busy:
        assert not one.step()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([[]], r"texts\[0\]: it is empty"),
        ([[1], [VOCAB]], r"texts\[1\]: token 64 is outside the vocabulary of 64"),
        ([[1] * (LONGEST + 1)], r"texts\[0\]: it has 25 tokens, and at most 24 are read; shorten"),
    ],
)
def test_texts_that_are_refused(asked, message):
    one = embedder()
    with pytest.raises(InputError, match=message):
        one.embed(asked)
    assert not one.busy


def test_models_and_sizes_that_are_refused():
    for head, message in [
        (None, "model: it tells logits of a vocabulary and no embeddings; open it with"),
        (HeadConfig(outputs=3, pool="mean"), r"model: it tells HeadConfig\(outputs=3"),
    ]:
        with pytest.raises(InputError, match=message):
            Embedder(described(dataclasses.replace(BERT, head=head)), single(), {})
    spec = described(BERT)
    with pytest.raises(InputError, match="longest: found 25, but the model's longest sequence is"):
        Embedder(spec, single(), {}, longest=25)
    with pytest.raises(InputError, match="tokens: found 0; give 1 or more"):
        Embedder(spec, single(), {}, tokens=0)
    with pytest.raises(PlanError, match="mesh axis 'stage': an engine runs all layers in one"):
        Embedder(spec, Plan(mesh={"stage": 2, "fsdp": 4}).bind(), {})


def test_sizes():
    assert sizes_of(512, 256) == (32, 128, 512)
    assert sizes_of(512, 8192) == (32, 128, 512, 8192)
    assert sizes_of(8, 8) == (8,)
