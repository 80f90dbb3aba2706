"""Sequences that cross the stages, several groups at once, are continued as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.aot import assert_collectives
from colossax.config import PipelineConfig, Plan, Segment, preset
from colossax.errors import InputError
from colossax.inference import Generator, Request, StagedProgram
from colossax.models import BloomConfig, GPT2Config, LlamaConfig, MistralConfig, maker
from colossax.nn import Decoder, Layers, describe, initialise
from tests.cases import quick_first
from tests.fresh import fresh_params
from tests.inference import test_caches as caches
from tests.inference.test_scheduler import ByTurns

SIZES = {"vocab": 128, "embed": 64, "layers": 8, "heads": 8, "max_seq": 64, "init_std": 0.2}
GROUPED = {**SIZES, "kv_heads": 2, "mlp": 96}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "gpt2": GPT2Config(**SIZES, mlp=96),
    "bloom": BloomConfig(**SIZES),
    "mistral": MistralConfig(**GROUPED, window=5),
}
WIDTH = 8


def requests(count):
    """Prompts of every length, greedy and drawn, some with one seed."""
    noise = np.random.default_rng(0)
    return [
        Request(
            prompt=tuple(noise.integers(0, 128, 1 + 7 * i % 23).tolist()),
            max_tokens=3 + 5 * i % 7,
            temperature=(0.0, 2.0)[i % 2],
            seed=i // 4,
        )
        for i in range(count)
    ]


def made(config, plan, **options):
    bound = plan.bind(jax.devices()[: int(np.prod(list(plan.mesh.values()), initial=1))])
    with colossax.use(bound):
        spec = describe(maker(config))
    params = fresh_params(config, spec, bound, jax.random.key(1))
    return Generator(spec, bound, params, tokens_per_step=WIDTH, **options)


@functools.cache
def alone(name):
    return made(CONFIGS[name], Plan(mesh={"fsdp": 1}))


@functools.cache
def truth(name, count):
    """Each continued alone, on one device."""
    return [alone(name).generate_all([one])[0] for one in requests(count)]


MESHES = {
    "stage2 fsdp2 tensor2": Plan(mesh={"stage": 2, "fsdp": 2, "tensor": 2}),
    "stage2": Plan(mesh={"stage": 2}),
    "stage4 fsdp2": Plan(mesh={"stage": 4, "fsdp": 2}),
    "stage8": Plan(mesh={"stage": 8}),
    "stage2 data2 tensor2": Plan(mesh={"stage": 2, "data": 2, "tensor": 2}),
    "stage2 ring2 ulysses2": Plan(mesh={"stage": 2, "ring": 2, "ulysses": 2}),
    "2d": Plan(mesh={"stage": 2, "row": 2, "col": 2}, tensor_layout="2d"),
    "2.5d": Plan(mesh={"stage": 2, "depth": 2, "row": 1, "col": 2}, tensor_layout="2.5d"),
    "3d": Plan(mesh={"stage": 2, "row": 2, "col": 2}, tensor_layout="3d"),
    "sequence split": preset("zero3+megatron_sp", mesh={"stage": 2, "fsdp": 2, "tensor": 2}),
    "vocabulary whole": Plan(mesh={"stage": 2, "fsdp": 2}, segments=(Segment(remat="full"),)),
}
QUICK = [("llama", "stage2 fsdp2 tensor2", 5, None), ("gpt2", "stage4 fsdp2", 3, 3)]
CASES = [
    *QUICK,
    *(("llama", plan, 5, 5) for plan in MESHES),
    *((name, "stage4 fsdp2", 6, 6) for name in CONFIGS),
    *((name, "stage2 fsdp2 tensor2", 3, 3) for name in CONFIGS),
    *(("llama", "stage4 fsdp2", count, sequences) for count in (1, 4, 9) for sequences in (1, 6)),
]


@pytest.mark.parametrize(
    ("name", "plan", "count", "sequences"), quick_first(dict.fromkeys(CASES), QUICK)
)
def test_tokens_are_those_of_one_device(name, plan, count, sequences):
    """Of fewer sequences than stages, as many, more, and no multiple of them."""
    generator = made(CONFIGS[name], MESHES[plan], sequences=sequences)
    assert isinstance(generator.program, StagedProgram) and generator.notice is None
    assert generator.generate_all(requests(count)) == truth(name, count)
