"""Requests of several adapters share steps, and each gets what its adapter alone would say."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import OffloadConfig, Plan
from colossax.errors import CheckpointError, InputError
from colossax.inference import beside
from colossax.inference.several import several
from colossax.models import T5Config
from colossax.nn import AdapterConfig
from colossax.nn.adapters.by_token import Turns, turns
from colossax.nn.adapters.several import SharesNoStepError
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference.beside import made
from tests.nn.test_adapters import MIXED

pytestmark = pytest.mark.slow

NAMES = (None, *made.ADAPTERS)
SMALL = {"pages": 24, "page_tokens": 4, "mixed_tokens": 16}
"""Too few pages for four long requests."""
T5 = T5Config(vocab=64, embed=16, layers=1, decoder_layers=1, heads=2, head_dim=8, mlp=16)
PLANS = {
    "one, a stack": Plan(),
    "fsdp 2, tensor 2": Plan(mesh={"fsdp": 2, "tensor": 2}),
    "tensor 8": Plan(mesh={"tensor": 8}),
    "host memory": Plan(mesh={"fsdp": 2}, offload=OffloadConfig(parameters=1.0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("beside")


@functools.cache
def stored(folder):
    """Base and adapters."""
    base = made.base(folder / "base")
    return base, made.adapters(folder, base)


def loaded(folder, plan=None, *, unroll=True, weights="own"):
    plan = plan or Plan()
    base, adapters = stored(folder)
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    return beside(base.with_weights(weights), adapters).load(plan, devices, unroll=unroll)


def requests():
    """Of the base and of each adapter, each prompt of all of them; greedy and drawn."""
    noise = np.random.default_rng(3)
    prompts = [tuple(noise.integers(0, 128, n).tolist()) for n in (33, 9, 21)]
    prompts.append((*prompts[0][:20], 5))
    return tuple(
        EngineRequest(
            prompt=prompt,
            max_tokens=(20, 3, 12)[i % 3],
            adapter=name,
            sampling=SamplingConfig(temperature=(i % 2) * 0.7, seed=i),
        )
        for i, (prompt, name) in enumerate((p, n) for p in prompts for n in NAMES)
    )


@functools.cache
def alone(folder):
    """What each request gets from a generator of its adapter, one at a time."""
    base, adapters = stored(folder)
    models = {name: base if name is None else adapters[name] for name in NAMES}
    generators = {
        name: one.load(devices=jax.devices()[:1]).generator() for name, one in models.items()
    }
    return [
        generators[one.adapter]
        .generate(
            one.prompt,
            max_tokens=one.max_tokens,
            temperature=one.sampling.temperature,
            seed=one.sampling.seed,
        )
        .tokens
        for one in requests()
    ]


def tokens(found):
    return [tuple(one.token for one in each if one.token is not None) for each in found]


@pytest.mark.catches("adapter-of-another-seat")
@pytest.mark.catches("prefix-of-another-adapter")
@pytest.mark.parametrize("seats", [4, 2])
def test_each_as_on_its_adapter_alone(folder, seats):
    """With prompts in chunks, prefixes and preemption; with two seats not all are multiplied."""
    engine = loaded(folder).engine(seats=seats, **SMALL)
    engine.warm()
    before = engine.program.compiled
    found = engine.generate_all(requests())
    assert tokens(found) == alone(folder)
    assert len({one[:3] for one in alone(folder)[:4]}) == 4  # one prompt, four answers
    stats = engine.stats.scheduler
    assert stats.reused and (stats.preemptions or seats == 2)
    assert engine.program.compiled == before == {"mixed": 1, "decode": 1}


@pytest.mark.parametrize("name", quick_first(PLANS, ["fsdp 2, tensor 2"]))
def test_any_mesh_says_what_one_device_says(folder, name):
    model = loaded(folder, PLANS[name], unroll=name != "one, a stack")
    assert tokens(model.engine(seats=4, **SMALL).generate_all(requests())) == alone(folder)


def logits(model, rows, numbers):
    """Of tokens `[b, s]`, each row of an adapter."""

    def of(params, rows):
        whose = Turns(jnp.repeat(jnp.asarray(numbers, jnp.int32), rows.shape[1]))
        with use(model.bound), turns(whose):
            return model.spec.merge(params)(rows)

    return np.asarray(jax.jit(of)(model.params, jnp.asarray(rows)))


@pytest.mark.parametrize("form", ["own", "int8", "fp8"])
def test_logits_are_those_of_merged_weights(folder, form):
    """Merged by NumPy, of codes into what they stand for."""
    base, adapters = stored(folder)
    rows = np.random.default_rng(1).integers(0, 128, (4, 24))
    found = logits(loaded(folder, weights=form), rows, [0, 1, 2, 3])
    for at, name in enumerate(NAMES):
        if name is None:
            one = base.load(devices=jax.devices()[:1], weights=form)
        else:
            place = folder / f"{name}-{form}-merged"
            one = made.merged(place, base, adapters[name], form).load(devices=jax.devices()[:1])
        wanted = logits(one, rows[at : at + 1], [0])[0]
        np.testing.assert_allclose(found[at], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_adapters_that_learned_beside_codes_stay_beside_them(folder, form):
    base, _ = stored(folder)
    configs = {
        f"{form} {name}": dataclasses.replace(config, base=form, targets="attn/*,mlp/down")
        for name, config in made.ADAPTERS.items()
    }
    adapters = made.adapters(folder, base, configs)
    model = beside(base, adapters).load(devices=jax.devices()[:1])
    rows = np.random.default_rng(1).integers(0, 128, (3, 16))
    found = logits(model, rows, [1, 2, 3])
    for at, one in enumerate(adapters.values()):
        wanted = logits(one.load(devices=jax.devices()[:1]), rows[at : at + 1], [0])[0]
        np.testing.assert_allclose(found[at], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.catches("adapters-in-float32")
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_widest_pair_of_each_map(folder, compute):
    """In the compute dtype: of each map the widest rank that any adapter has there, of all."""
    base, adapters = stored(folder)
    plan = base.plan.replace(precision=dataclasses.replace(base.precision, compute=compute))
    whole = base.load(plan, jax.devices()[:1]).weight_bytes[0]
    found = beside(base, adapters).load(plan, jax.devices()[:1]).weight_bytes[0]
    d, f, v, kv, layers = 64, 128, 128, 16, 4
    ranks = [(d + d, 4), (d + kv, 2), (d + kv, 2), (d + d, 8), *[(d + f, 8)] * 3]
    numbers = layers * sum(sides * rank for sides, rank in ranks) + (d + v) * 4
    assert found - whole == len(adapters) * numbers * np.dtype(jnp.dtype(compute)).itemsize


def test_known_prompts_of_several_adapters_share_steps(folder):
    model = loaded(folder, unroll=False)
    asked = [one for one in requests() if one.sampling.temperature == 0]
    given = model.spec, model.bound, model.params
    found = several(*given, requests=asked, adapters=model.adapters).run()
    wanted = [a for a, one in zip(alone(folder), requests(), strict=True) if one in asked]
    assert [one.tokens for one in found] == wanted


@pytest.mark.catches("adapter-unknown")
def test_names_that_there_are_none_of_are_refused(folder):
    base, _ = stored(folder)
    model = loaded(folder, unroll=False)
    engine = model.engine(seats=1, slots=8)
    with pytest.raises(InputError, match=r"adapter: found 'x'; give one of narrow, wide, head, or"):
        engine.add(EngineRequest(prompt=(1,), max_tokens=1, adapter="x"))
    plain = base.load(devices=jax.devices()[:1]).engine(seats=1, slots=8)
    with pytest.raises(InputError, match="adapter: found 'x', and the engine has none; leave it"):
        plain.add(EngineRequest(prompt=(1,), max_tokens=1, adapter="x"))
    with pytest.raises(InputError, match="found the names a, a, and the model has 3 side by side"):
        dataclasses.replace(model, adapters=("a", "a")).engine(seats=1)
    with pytest.raises(InputError, match="nobody said whose each token is; run the model by inf"):
        model.generator().generate((1, 2), max_tokens=1)


@pytest.mark.catches("adapters-beside-another-base")
@pytest.mark.catches("codes-of-two-forms")
def test_what_cannot_be_beside_others_is_refused(folder):
    base, adapters = stored(folder)
    dora = made.adapter(folder / "dora", base, AdapterConfig(rank=2, dora=True), 1)
    with pytest.raises(SharesNoStepError, match=r"adapter 'd': it has lengths of columns \(adap"):
        beside(base, {"d": dora})
    with pytest.raises(InputError, match=r"adapters: '.*narrow' is an adapter itself; give its"):
        beside(adapters["narrow"], adapters)
    with pytest.raises(CheckpointError, match="holds a whole model and no adapter; load it apart"):
        beside(base, {"b": base})
    other = made.base(folder / "other", seed=1)
    with pytest.raises(CheckpointError, match="adapter 'narrow' .* is an adapter of another base"):
        beside(other, adapters)
    coded = AdapterConfig(rank=2, base="nf4")
    nf4 = {"c": made.adapter(folder / "coded", base, coded, 1)}
    for one in (beside(base, nf4).with_weights, lambda form: beside(base.with_weights(form), nf4)):
        with pytest.raises(InputError, match="int8 is asked for, and the adapters learned beside"):
            one("int8")
    with pytest.raises(CheckpointError, match="kept as own, and those that are loaded are kept as"):
        beside(base, {**nf4, **adapters})


@pytest.mark.catches("adapter-of-no-numbers")
@pytest.mark.parametrize("spoil", [np.nan, np.inf])
def test_an_adapter_that_holds_no_numbers_is_refused(folder, spoil):
    base, _ = stored(folder)
    config = AdapterConfig(rank=2, targets="attn/o")
    one = made.adapter(folder / f"no {spoil}", base, config, 1, spoil=spoil)
    with pytest.raises(CheckpointError, match="adapter 'n': '.*' of '.*' step 1 holds numbers"):
        beside(base, {"n": one}).load(devices=jax.devices()[:1])


@pytest.mark.parametrize("which", ["latent", "source", "stages"])
def test_models_that_do_more_than_multiply_share_no_step(folder, which):
    devices = jax.devices()[:1]
    if which == "latent":
        base = made.base(folder / "latent", MIXED)
        config = AdapterConfig(rank=2, targets="attn/*")
        one = {"a": made.adapter(folder / "of-latent", base, config, 1)}
        with pytest.raises(SharesNoStepError, match="'a': it has a pair beside 'attn/kv_up', wh"):
            beside(base, one).load(devices=devices)
    elif which == "source":
        base = made.base(folder / "t5", T5)
        config = AdapterConfig(rank=2, targets="attn/q")
        one = {"a": made.adapter(folder / "of-t5", base, config, 1)}
        with pytest.raises(SharesNoStepError, match="the model reads a source, sound or images"):
            beside(base, one).load(devices=devices)
    else:
        base, adapters = stored(folder)
        with pytest.raises(SharesNoStepError, match="mesh axis 'stage': adapters beside one ba"):
            beside(base, adapters).load(Plan(mesh={"stage": 2}), jax.devices()[:2])
