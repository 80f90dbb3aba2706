"""Decoding taken apart: a scheduler without JAX, one program for any parameters."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

import colossax
from colossax.config import Segment
from colossax.inference import Continuation, Generator, InOrder, Request
from colossax.models import LlamaConfig, maker
from colossax.nn import describe
from colossax.sharding import Layout, transfer
from tests.fresh import fresh_params

CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=32)
PROMPTS = tuple(range(3, 24)), (5, 1, 9)


@pytest.fixture(scope="module")
def model():
    """Spec, devices, and two sets of parameters."""
    bound = colossax.Plan().bind(jax.devices()[:1])
    with colossax.use(bound):
        spec = describe(maker(CONFIG))
    return spec, bound, [fresh_params(CONFIG, spec, bound, jax.random.key(i)) for i in (1, 2)]


@pytest.fixture(scope="module")
def generator(model):
    spec, bound, params = model
    return Generator(spec, bound, params[0], tokens_per_step=8)


def continued(generator, prompt):
    return generator.generate(prompt, max_tokens=6, temperature=2.0, seed=4).tokens


@pytest.mark.catches("parameters-compiled-in")
def test_two_sets_of_parameters_share_one_program(model, generator):
    spec, bound, (_, second) = model
    other = generator.with_params(second)
    found = [continued(each, PROMPTS[0]) for each in (generator, other, generator)]
    assert generator.program.jitted._cache_size() == 1
    assert other.program is generator.program
    assert found[0] == found[2] != found[1]
    assert found[1] == continued(Generator(spec, bound, second), PROMPTS[0])


def test_parameters_in_training_are_served_elsewhere_by_one_program(model, generator, devices):
    """Trained as one stack over four devices, served layer by layer by two others."""
    training = colossax.Plan(mesh={"fsdp": 4}).bind(devices[:4])
    single = colossax.Plan(mesh={"tensor": 2}, segments=(Segment(count=1), Segment(count=1)))
    serving = single.bind(devices[4:6])
    specs = []
    for bound in (training, serving):
        with colossax.use(bound):
            specs.append(describe(maker(CONFIG)))
    source, target = (
        Layout(bound=bound, infos=spec.infos)
        for bound, spec in zip((training, serving), specs, strict=True)
    )
    served = Generator(specs[1], serving, {})
    for seed, params in zip((1, 2), model[2], strict=True):
        trained = fresh_params(CONFIG, specs[0], training, jax.random.key(seed))
        synced = served.with_params(transfer(trained, source, target, donate=True))
        assert continued(synced, PROMPTS[1]) == continued(generator.with_params(params), PROMPTS[1])
    assert served.program.jitted._cache_size() == 1


class ByTurns:
    """A call of each sequence in turn."""

    def __init__(self, requests, *, width):
        self.left = {
            i: Continuation(request, sequence=i, width=width) for i, request in enumerate(requests)
        }
        self.order = []

    def next(self):
        ready = [i for i, one in self.left.items() if one.ready]
        if not ready:
            return None
        last = self.order[-1] if self.order else -1
        turn = next((i for i in ready if i > last), ready[0])
        self.order.append(turn)
        return self.left[turn].next()

    def took(self, sequence, token):
        ended = self.left[sequence].took(token)
        if ended:
            del self.left[sequence]
        return ended


@pytest.mark.catches("one-cache-for-all")
def test_a_scheduler_of_ones_own_lets_two_prompts_take_turns(generator):
    requests = [Request(prompt=prompt, max_tokens=6, temperature=2.0, seed=4) for prompt in PROMPTS]
    scheduler = ByTurns(requests, width=generator.program.width)
    found = {0: (), 1: ()}
    for sequence, token in generator.follow(scheduler):
        found[sequence] += (token,)
    assert scheduler.order == [0, 1] * 6 + [0, 0]
    assert found == {i: continued(generator, prompt) for i, prompt in enumerate(PROMPTS)}
    assert generator.program.jitted._cache_size() == 1


def test_a_prompt_goes_in_by_chunks_and_its_continuation_token_by_token():
    scheduler = InOrder([Request(prompt=(1, 2, 3, 4, 5), max_tokens=9)], width=2, eos=7)
    calls = [scheduler.next() for _ in range(3)]
    assert [(c.tokens, c.start, c.emits) for c in calls] == [
        ((1, 2), 0, False),
        ((3, 4), 2, False),
        ((5,), 4, True),
    ]
    assert not scheduler.took(0, 6)
    call = scheduler.next()
    assert (call.tokens, call.start, call.emits) == ((6,), 5, True)
    assert scheduler.took(0, 7)
    assert scheduler.next() is None


WITHOUT_JAX = """
import importlib, sys, types
for name in ("colossax", "colossax.inference"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
importlib.import_module("colossax.inference.scheduler")
print("jax" in sys.modules or "numpy" in sys.modules)
"""


@pytest.mark.catches("scheduler-without-jax")
def test_the_scheduler_imports_no_jax():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, str(root)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
