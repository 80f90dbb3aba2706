"""Generation with layers in host memory, compiled for GPUs that are not there, against formulas."""

import functools
import math

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import (
    compile_program,
    host_compute,
    host_copies,
    parse_module,
    parse_target,
    sync_transfers_in_loops,
    target_devices,
)
from colossax.aot.lints import exposed_transfers
from colossax.config import OffloadConfig, Plan, Precision
from colossax.inference import Generator, inference_plan
from colossax.models import LlamaConfig, maker
from colossax.nn import describe
from colossax.pallas.target import target
from colossax.sharding import param_sharding

pytestmark = [pytest.mark.aot, pytest.mark.slow]

MIB = 2**20
SLOTS = 4096
LLAMA_70B = LlamaConfig(
    vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672, max_seq=8192
)
HEAD_DIM = 128
MATRICES = {
    "q": 8192 * 64 * HEAD_DIM,
    "k": 8192 * 8 * HEAD_DIM,
    "v": 8192 * 8 * HEAD_DIM,
    "o": 64 * HEAD_DIM * 8192,
    **dict.fromkeys(("gate", "up", "down"), 8192 * 28672),
}
LAYER_BYTES = 2 * sum(MATRICES.values())
TABLE_BYTES = 2 * 128256 * 8192
CACHE_BYTES = 2 * 2 * 80 * SLOTS * 8 * HEAD_DIM
VECTOR_BYTES = 2 * (2 * 80 + 1) * 8192


@functools.cache
def _compiled(share: float, shape: str = "1x1", **mesh: int):
    """The decode step with this share of the layers in host memory."""
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    plan = Plan(mesh=mesh, precision=bf16, offload=OffloadConfig(parameters=share))
    bound = inference_plan(plan).bind(target_devices(parse_target(f"h200:{shape}")))
    with target("gpu", compute_capability=(9, 0)):
        with colossax.use(bound):
            spec = describe(maker(LLAMA_70B))
        params = jax.tree.map(
            lambda info: jax.ShapeDtypeStruct(
                info.shape, np.dtype("bfloat16"), sharding=param_sharding(bound, "params", info)
            ),
            spec.infos,
        )
        return compile_program(Generator(spec, bound, params, slots=SLOTS).lowered())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_step_needs_one_layer_beside_what_lives_on_the_device(share):
    program = _compiled(share)
    stats = program.stats
    resident = round(80 * (1 - share)) * LAYER_BYTES
    arguments = 2 * TABLE_BYTES + VECTOR_BYTES + CACHE_BYTES + resident
    assert 0 <= stats.argument_size_in_bytes - arguments < MIB
    assert stats.host_argument_size_in_bytes == 80 * LAYER_BYTES - resident
    assert program.host_bytes == stats.host_argument_size_in_bytes
    assert LAYER_BYTES <= stats.temp_size_in_bytes < LAYER_BYTES + 8 * MIB
    assert program.device_bytes < arguments + LAYER_BYTES + 9 * MIB


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
def test_devices_share_the_layers_in_host_memory(mesh):
    program = _compiled(1.0, "1x8", **mesh)
    assert program.stats.host_argument_size_in_bytes == 80 * LAYER_BYTES // 8
    assert program.host_bytes == program.stats.host_argument_size_in_bytes
    kv_split = mesh.get("tensor", 1)
    held = 2 * TABLE_BYTES // 8 + VECTOR_BYTES + CACHE_BYTES // kv_split
    assert program.device_bytes < held + LAYER_BYTES // 8 + 16 * MIB


@pytest.mark.parametrize(
    ("share", "shape", "mesh"),
    [(1.0, "1x1", ()), (0.5, "1x1", ()), (1.0, "1x8", (("fsdp", 4), ("tensor", 2)))],
)
def test_layers_come_asynchronously_and_whole_stacks_are_never_copied(share, shape, mesh):
    module = parse_module(_compiled(share, shape, **dict(mesh)).hlo)
    assert host_copies(module) == []
    assert host_compute(module) == []
    assert sync_transfers_in_loops(module) == []
    fetched = sorted(_fetched(module))
    devices = math.prod(size for _, size in mesh)
    assert fetched == sorted(2 * size // devices for size in MATRICES.values())


def test_compute_runs_beside_what_is_needed_last():
    """Each layer is fetched in its own turn: its first matmuls wait, its last two matrices do not.

    A step is bound by the bus, not by its matmuls, so a ring of two layers would hide hardly more
    and take the memory of a second one.
    """
    module = parse_module(_compiled(1.0).hlo)
    exposed = len(exposed_transfers(module, larger_than=MIB))
    assert len(_fetched(module)) - exposed >= 2


def _fetched(module) -> list[int]:
    """Bytes of each array that a loop body fetches from host memory."""
    from colossax.aot.lints import _transfer_bytes

    bodies = {
        called
        for one in module.by_name.values()
        if one.opcode == "while"
        for role, called in one.called
        if role == "body"
    }
    sizes = [_transfer_bytes(one) for name in bodies for one in module.computations[name]]
    return [size for size in sizes if size > MIB]
