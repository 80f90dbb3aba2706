"""Training steps with layers in host memory, compiled for a GPU that is not there."""

import dataclasses
import functools
from typing import Any

import pytest

from colossax.aot import (
    Program,
    compile_program,
    full_stack_copies,
    host_arithmetic,
    host_compute,
    host_copies,
    parse_module,
    parse_target,
    sync_transfers_in_loops,
    target_devices,
    transfers,
)
from colossax.config import (
    PIPELINED_OPTION,
    BatchConfig,
    LossConfig,
    OffloadConfig,
    Plan,
    Precision,
    Segment,
)
from colossax.models import LlamaConfig
from colossax.pallas.target import target as pallas_target
from colossax.planner.counting.compiled import compiled_step
from colossax.planner.task_step import task_step
from colossax.tasks import DataConfig, OptimizerConfig, TrainConfig, task_of

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

GIB = 2**30
LAYERS, EMBED, MLP, TOKENS = 8, 1024, 2816, 2048
MATRICES = 4 * EMBED**2 + 3 * EMBED * MLP
"""Parameters in the matrices of one layer."""

SGD = OptimizerConfig(name="sgd", b1=0.0, weight_decay=0.0)
HALF = Precision(params="bfloat16", compute="bfloat16", accumulation="bfloat16")
FULL = Segment(remat="full")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step; `clipping` None does not clip."""

    clipping: str | None = "stack"
    layers: int = LAYERS
    tokens: int = TOKENS
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Precision = Precision(compute="bfloat16")
    segment: Segment = FULL
    activations: float = 1.0
    pieces: int = 1
    target: str = "h200:1x1"

    @property
    def config(self) -> TrainConfig:
        """As a run."""
        offload = OffloadConfig(
            parameters=1.0,
            optimizer=1.0,
            activations=self.activations,
            clipping=self.clipping or "stack",
        )
        devices = parse_target(self.target).size
        return TrainConfig(
            recipe="offload",
            model=LlamaConfig(
                vocab=2048,
                embed=EMBED,
                layers=self.layers,
                heads=8,
                kv_heads=8,
                mlp=MLP,
                max_seq=TOKENS,
            ),
            plan=Plan(
                segments=(self.segment,),
                precision=self.precision,
                loss=LossConfig(vocab_chunks=8),
                batch=BatchConfig(accumulation=self.pieces),
                offload=offload,
            ),
            data=DataConfig(seq_len=self.tokens, global_batch=devices * self.pieces),
            optimizer=self.optimizer,
            steps=10,
            clip_norm=None if self.clipping is None else 1.0,
        )


@functools.cache
def compiled(case: Case, *, evaluation: bool = False) -> tuple[Program, Any]:
    """The program and its jaxpr; of the step, or of evaluation."""
    target = parse_target(case.target)
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        step = task_step(task_of(case.config), case.config.plan, target_devices(target))
        batch = step.abstract_batch(task_of(case.config).shapes)
        state = step.abstract
        if evaluation:
            traced = step.evaluation.trace(state["params"], state["variables"], batch)
        else:
            traced = step.jitted.trace(state, batch)
        return compile_program(traced.lower()), traced.jaxpr


def assert_clean(case, *, evaluation=False):
    """Whole stacks are never copied, the host computes nothing, no loop waits for a transfer."""
    program, jaxpr = compiled(case, evaluation=evaluation)
    module = parse_module(program.hlo)
    speculates = case.clipping == "speculate"
    if speculates:  # its loop of passes turns once or twice
        module = module.with_trip_count(1)
    assert full_stack_copies(module) == []
    assert host_copies(module) == []
    assert host_compute(module) == []
    assert sync_transfers_in_loops(module) == []
    assert host_arithmetic(jaxpr) == []
    if not evaluation:
        s = program.stats
        lent = 0 if speculates else s.host_argument_size_in_bytes
        assert s.host_alias_size_in_bytes == lent
        assert s.host_output_size_in_bytes == s.host_argument_size_in_bytes
    return program


INPUTS = LAYERS * TOKENS * 2 * EMBED
"""Bytes of what the layers get, in bfloat16."""

ADAM = 12 * LAYERS * MATRICES
LOMO = Case(None, optimizer=SGD, precision=HALF)

HOST_BYTES = {
    "no clipping": (Case(None), ADAM + INPUTS),
    "stack": (Case("stack"), ADAM + INPUTS + 2 * LAYERS * MATRICES),
    "two passes": (Case("two_pass"), ADAM + INPUTS),
    "by layer": (Case("layer"), ADAM + INPUTS),
    "speculation": (Case("speculate"), 2 * ADAM + INPUTS),
    "microbatches": (Case("stack", pieces=2), ADAM + INPUTS + 4 * LAYERS * MATRICES),
    "lomo": (LOMO, 2 * LAYERS * MATRICES + INPUTS),
    "names": (
        Case("layer", segment=Segment(remat="attention", offload="mlp"), activations=0.0),
        ADAM + LAYERS * TOKENS * 2 * 2 * MLP,  # of both matrices that make the hidden state
    ),
}


@pytest.mark.parametrize("name", HOST_BYTES)
def test_host_bytes_follow_the_formula(name):
    case, wanted = HOST_BYTES[name]
    program = assert_clean(case)
    assert wanted <= program.host_bytes <= 1.01 * wanted


@pytest.mark.parametrize("clipping", ["stack", "speculate", None])
def test_device_memory_does_not_grow_with_the_layers(clipping):
    """But for the vectors', a few of D for each layer."""
    few, many = (compiled(Case(clipping, layers=layers))[0] for layers in (LAYERS, 8 * LAYERS))
    assert many.stats.temp_size_in_bytes <= 1.01 * few.stats.temp_size_in_bytes
    assert few.stats.temp_size_in_bytes < 12 * LAYERS * MATRICES / 2


def test_devices_hold_their_parts():
    case, wanted = HOST_BYTES["stack"]
    program = assert_clean(dataclasses.replace(case, target="h200:1x8"))
    state = wanted - INPUTS
    assert wanted - INPUTS <= 8 * (program.host_bytes - INPUTS) <= 1.01 * state


def test_without_rematerialisation_weights_are_not_kept_for_each_layer():
    """Backward fetches them again; with so few tokens, keeping them would take most of the room."""
    program = assert_clean(Case("two_pass", tokens=64, segment=Segment()))
    kept = program.host_bytes - ADAM
    assert 0 < kept < 2 * LAYERS * MATRICES / 2


def test_evaluation_fetches_layer_by_layer():
    program = assert_clean(Case(), evaluation=True)
    assert program.stats.host_argument_size_in_bytes == 4 * LAYERS * MATRICES
    assert program.stats.host_temp_size_in_bytes == 0
    assert program.stats.temp_size_in_bytes < 4 * LAYERS * MATRICES / 2


def large(*, model, offload, rows, precision, optimizer, seq_len=4096):
    """(GiB on the device, GiB on the host) of a step at full size on an H200."""
    config = TrainConfig(
        recipe="offload",
        model=model,
        plan=Plan(
            segments=(FULL,),
            precision=precision,
            loss=LossConfig(vocab_chunks=8),
            offload=offload,
        ),
        data=DataConfig(seq_len=seq_len, global_batch=rows),
        optimizer=optimizer,
        steps=10,
        clip_norm=1.0,
    )
    _, program, _ = compiled_step(config, parse_target("h200:1x1"))
    return program.device_bytes / GIB, program.host_bytes / GIB


def test_thirteen_billion_parameters_with_adam():
    """18 of 40 layers are in host memory, and T is 32768."""
    share = 18 / 40
    device, host = large(
        model=LlamaConfig(
            vocab=32_000, embed=5120, layers=40, heads=40, kv_heads=8, mlp=17_408, max_seq=4096
        ),
        offload=OffloadConfig(
            parameters=share, optimizer=share, activations=share, clipping="two_pass"
        ),
        rows=8,
        precision=Precision(compute="bfloat16"),
        optimizer=OptimizerConfig(),
    )
    assert device <= 110
    assert host <= 95


def test_llama_65b_without_host_memory():
    """Plain SGD in bfloat16: no gradient is ever whole."""
    device, host = large(
        model=LlamaConfig(
            vocab=32_000, embed=8192, layers=80, heads=64, kv_heads=64, mlp=22_016, max_seq=4096
        ),
        offload=OffloadConfig(fused=True, clipping="two_pass"),
        rows=1,
        precision=HALF,
        optimizer=SGD,
    )
    assert device <= 132
    assert host == 0


def test_seventy_billion_parameters_fit_one_gpu():
    device, _ = large(
        model=LlamaConfig(
            vocab=128_256, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28_672, max_seq=4096
        ),
        offload=OffloadConfig(parameters=0.2, optimizer=0.2, activations=0.2, clipping="two_pass"),
        rows=1,
        precision=HALF,
        optimizer=SGD,
    )
    assert device <= 140


@functools.cache
def loops_of_activations(*, pipelined):
    """Transfers of a step whose layers' inputs alone are in host memory."""
    config = Case(None).config
    plan = config.plan.replace(offload=OffloadConfig(activations=1.0))
    target = parse_target("h200:1x1")
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        step = task_step(task_of(config), plan, target_devices(target))
        lowered = step.jitted.lower(step.abstract, step.abstract_batch(task_of(config).shapes))
    program = compile_program(lowered, options={PIPELINED_OPTION: True} if pipelined else None)
    return {
        direction: [one for one in transfers(program.hlo) if one.direction == direction]
        for direction in ("to_device", "to_host")
    }


def test_pipelined_transfers_move_across_iterations():
    """The same bytes. One execution of each leaves its loop; a fetch then runs beside the matmuls
    of the layer before its own, a store at the start of the next iteration beside none."""
    off, on = (loops_of_activations(pipelined=each) for each in (False, True))
    for direction in off:
        (plain,), moved = off[direction], sorted(on[direction], key=lambda one: one.times)
        assert (plain.times, plain.in_loop) == (LAYERS, True)
        assert [(one.times, one.in_loop) for one in moved] == [(1, False), (LAYERS - 1, True)]
        assert {one.bytes for one in moved} == {plain.bytes}
        assert all(one.asynchronous for one in (plain, *moved))
    matmuls = {
        direction: (off[direction][0].matmuls, max(one.matmuls for one in on[direction]))
        for direction in off
    }
    assert matmuls["to_device"][1] > matmuls["to_device"][0] >= 1
    assert matmuls["to_host"][0] > matmuls["to_host"][1] == 0
