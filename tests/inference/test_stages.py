"""Sequences that cross the stages, several groups at once, are continued as on one device."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import collectives
from colossax.config import OffloadConfig, PipelineConfig, Plan, Segment, preset
from colossax.errors import InputError
from colossax.inference import Generator, InOrder, Request, StagedProgram, Tick
from colossax.inference.crossing import Seats
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


@pytest.mark.catches("stage-groups-share-caches")
@pytest.mark.catches("stage-padding-is-written")
@pytest.mark.catches("stage-another-side")
@pytest.mark.parametrize(
    ("name", "plan", "count", "sequences"), quick_first(dict.fromkeys(CASES), QUICK)
)
def test_tokens_are_those_of_one_device(name, plan, count, sequences):
    """Of fewer sequences than stages, as many, more, and no multiple of them."""
    generator = made(CONFIGS[name], MESHES[plan], sequences=sequences)
    assert isinstance(generator.program, StagedProgram) and generator.notice is None
    assert generator.generate_all(requests(count)) == truth(name, count)


def test_the_sequences_differ():
    """The tests above could pass with a model that says one thing."""
    found = truth("llama", 6)
    assert len({one.tokens[:3] for one in found}) == 6
    assert len({len(one.prompt_tokens) for one in found}) == 6


@pytest.mark.parametrize(("sequences", "groups", "rows"), [(None, 2, 1), (1, 1, 1), (5, 2, 3)])
def test_sequences_are_cut_into_groups(sequences, groups, rows):
    program = made(CONFIGS["llama"], MESHES["stage2"], sequences=sequences).program
    assert (program.groups, program.rows) == (groups, rows)
    cache = program.start(made_params("stage2")).cache
    shape = (1, 8 // 2 * groups, rows, 64, 2, 8)
    assert {shard.data.shape for shard in cache["k"].addressable_shards} == {shape}


def made_params(plan):
    return made(CONFIGS["llama"], MESHES[plan])._params


@pytest.mark.catches("stage-seat-kept")
def test_a_sequence_ends_at_its_token_and_the_next_takes_its_place():
    expected = truth("llama", 5)
    eos = expected[0].tokens[1]
    generator = made(CONFIGS["llama"], MESHES["stage2"], sequences=2, eos=eos)
    found = generator.generate_all(requests(5))
    assert found[0].ended and found[0].tokens == expected[0].tokens[:2]
    for one, whole in zip(found, expected, strict=True):
        end = whole.tokens.index(eos) + 1 if eos in whole.tokens else len(whole.tokens)
        assert one.tokens == whole.tokens[:end] and one.ended == (eos in whole.tokens)


@pytest.mark.catches("stage-group-too-wide")
def test_a_tick_holds_every_sequence_of_a_group():
    config = CONFIGS["llama"]
    bound = MESHES["stage2"].bind(jax.devices()[:2])
    generator = Generator(
        describe_under(bound, config), bound, made_params("stage2"), tokens_per_step=1, sequences=6
    )
    assert generator.program.width == 3
    assert generator.generate_all(requests(6)) == truth("llama", 6)


def describe_under(bound, config):
    with colossax.use(bound):
        return describe(maker(config))


def test_one_compilation_serves_every_prompt():
    generator = made(CONFIGS["llama"], MESHES["stage2"])
    generator.generate((1, 2, 3), max_tokens=2)
    program = generator.program
    params = fresh_params(CONFIGS["llama"], program.spec, generator.bound, jax.random.key(2))
    other = generator.with_params(params)
    assert other.generate_all(requests(3)) != generator.generate_all(requests(3))
    assert generator.program.jitted._cache_size() == 1


@pytest.mark.catches("stage-sequence-twice")
def test_a_scheduler_of_ones_own():
    generator = made(CONFIGS["llama"], MESHES["stage2"])
    asked = requests(2)
    found = {0: (), 1: ()}
    for sequence, token in generator.follow(ByTurns(asked, width=3)):  # several fit into a tick
        found[sequence] += (token,)
    assert list(found.values()) == [one.tokens for one in truth("llama", 2)]
    with pytest.raises(InputError, match=r"sequences: 3 have begun.*Generator\(sequences=3\)"):
        list(generator.follow(ByTurns(requests(3), width=WIDTH)))


def test_a_call_that_fits_into_no_tick_is_refused():
    seats = Seats(groups=2, rows=1, width=WIDTH)
    one = Request(prompt=tuple(range(WIDTH + 1)), max_tokens=2)
    with pytest.raises(InputError, match=r"9 tokens, and 8 enter at a tick; .*_per_step=9\)$"):
        seats.add(InOrder([one], width=2 * WIDTH).next())


@pytest.mark.parametrize("count", [0, -1])
def test_caches_for_no_sequence_are_refused(count):
    bound, config = STAGE2.bind(jax.devices()[:2]), CONFIGS["llama"]
    with pytest.raises(InputError, match=f"sequences: found {count}; give 1 or more"):
        StagedProgram(describe_under(bound, config), bound, sequences=count)


def between_stages(generator):
    """Payload bytes of a tick by kind of collective, of all that crosses axis `stage`."""
    text = generator.lowered().compile().as_text()
    found = collections.Counter()
    for one in collectives(text, generator.bound.mesh):
        if "stage" in one.axes:
            found[one.kind] += one.bytes
    return found


def activations(program, devices, itemsize=4):
    """What crosses in a tick: tokens to the next stage, from the table, and to the head.

    Stages have the table by its width, of which each gives its part.
    """
    hidden = program.width * program.config.embed * itemsize
    # Of each row, of the likeliest and of the drawn token, number and weight from each device.
    chosen = program.rows * 2 * (4 + 4) * devices
    return {"collective-permute": hidden, "all-reduce": hidden, "all-gather": hidden + chosen}


@pytest.mark.catches("stage-side-not-pinned")
@pytest.mark.parametrize(
    ("plan", "devices", "layers", "sequences"),
    quick_first(
        [("stage4 fsdp2", 4, 8, 8), ("stage4 fsdp2", 4, 16, 8), ("stage2 fsdp2 tensor2", 4, 8, 3)],
        3,
    ),
)
def test_activations_alone_go_between_stages(plan, devices, layers, sequences):
    config = dataclasses.replace(CONFIGS["llama"], layers=layers)
    generator = made(config, MESHES[plan], sequences=sequences)
    assert between_stages(generator) == activations(generator.program, devices)


@pytest.mark.catches("flight-not-donated")
def test_the_flight_is_donated():
    generator = made(CONFIGS["llama"], MESHES["stage2"])
    program = generator.program
    flight = program.start(generator._params)
    now = Tick.empty(width=program.width, stages=2, rows=1)
    program(generator._params, flight, now)
    assert flight.cache["k"].is_deleted() and flight.carry.is_deleted()


OWN = {
    "recurrent": (caches.CONFIG, Layers(make=caches.recurrent, order=4)),
    "latent": (dataclasses.replace(caches.LATENT, layers=4), None),
    "kinds in turn": (
        caches.CONFIG,
        Layers(
            make={k: caches.KINDS[k] for k in ("local", "global")}, order=["local", "global"] * 2
        ),
    ),
}


class Reminded(Decoder):
    """A model that reads its tokens once more behind the layers."""

    def decode(self, tokens, cache, flat):
        hidden, cache = super().decode(tokens, cache, flat)
        return hidden + self.embed(tokens[None])[0], cache


def own_model(plan, config, layers=None, make=Decoder):
    bound = plan.bind(jax.devices()[: int(np.prod(list(plan.mesh.values())))])
    with colossax.use(bound):
        spec = describe(lambda rngs: make(config, rngs=rngs, layers=layers))
    return Generator(spec, bound, initialise(spec, bound, jax.random.key(1)), tokens_per_step=4)


STAGE2 = Plan(mesh={"stage": 2})
CUTS = STAGE2.replace(pipeline=PipelineConfig(cuts=(3, 1)))


@pytest.mark.parametrize("name", quick_first(OWN, ["recurrent"]))
def test_caches_of_every_kind(name):
    config, layers = OWN[name]
    asked = [
        dataclasses.replace(one, prompt=tuple(t % 64 for t in one.prompt)) for one in requests(5)
    ]
    staged, one = (own_model(plan, config, layers) for plan in (STAGE2, Plan(mesh={"fsdp": 1})))
    assert (staged.notice is None) == (name != "kinds in turn")
    assert staged.generate_all(asked) == one.generate_all(asked)


FOUR = dataclasses.replace(caches.CONFIG, layers=4)
FALLS_BACK = {
    "kinds in turn": (STAGE2, Decoder, OWN["kinds in turn"], "layers of several kinds take turns"),
    "two segments": (
        STAGE2.replace(segments=(Segment(count=2), Segment())),
        Decoder,
        (FOUR, None),
        "not one run of one layer stack",
    ),
    "chunks": (
        STAGE2.replace(pipeline=PipelineConfig(chunks=2)),
        Decoder,
        (FOUR, None),
        "not one run of one layer stack",
    ),
    "cuts": (CUTS, Decoder, (FOUR, None), "not one run of one layer stack"),
    "host memory": (
        STAGE2.replace(offload=OffloadConfig(parameters=1.0)),
        Decoder,
        (FOUR, None),
        "layers live in host memory",
    ),
    "read once more": (STAGE2, Reminded, (FOUR, None), "reads its tokens behind the layers"),
}


@pytest.mark.catches("stage-reads-past")
@pytest.mark.parametrize(
    ("plan", "make", "model", "reason"),
    quick_first(FALLS_BACK.values(), [FALLS_BACK["read once more"]]),
)
def test_what_stages_cannot_share_is_gathered_and_said(plan, make, model, reason):
    staged = own_model(plan, *model, make)
    assert staged.notice is not None and reason in staged.notice
    assert "every device gathers the layers of all 2 stages" in staged.notice
    one = own_model(Plan(mesh={"fsdp": 1}), *model, make)
    assert staged.generate((1, 2, 3), max_tokens=8) == one.generate((1, 2, 3), max_tokens=8)


@pytest.mark.catches("generator-of-one-stage")
def test_parameters_of_stages_with_programs_are_copied_to_all():
    bound = CUTS.bind(jax.devices()[:2])
    with colossax.use(bound):
        spec = describe(lambda rngs: Decoder(FOUR, rngs=rngs))
    params = initialise(spec, bound, jax.random.key(1))
    staged = Generator(spec, bound, params, tokens_per_step=4)
    assert staged.notice is not None and "every device gathers" in staged.notice
    staged.lowered()
    for generator in (staged, staged.with_params(params)):
        shapes = jax.tree.leaves(generator.arguments[0])
        assert all(x.sharding.device_set == set(bound.mesh.devices.flat) for x in shapes)
