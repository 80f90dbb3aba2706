"""Grouped matmul on an H100 that is not there: what the assembler says, and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from colossax.aot import collectives, kernel_reports, parse_target, target_devices
from colossax.pallas import target
from colossax.pallas.grouped_matmul import grouped_matmul
from colossax.pallas.grouped_matmul import mosaic_gpu as kernels
from tests.aot.assembled import assert_fast

pytestmark = pytest.mark.aot

T, D, F, E = 8192, 4096, 4096, 8
H100 = parse_target("h100:1x1")
FENCE = ("C7519",)
"""The assembler says that it adds one where the sum stays in registers between two products."""


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


SIZES = shape(E, dtype=jnp.int32)
OPERANDS = {
    "forward": (kernels.multiply, shape(T, D), shape(E, D, F)),
    "by x": (functools.partial(kernels.multiply, transposed=True), shape(T, F), shape(E, D, F)),
    "by w": (kernels.weight_gradient, shape(T, D), shape(T, F)),
}


def expected(kind, tiles):
    """Instructions of the kernel, as the compiler unrolls its loops."""
    products = kernels.DEPTH // 16
    stores = tiles.columns // kernels.CHUNK
    if kind == "by w":
        # The loop that copies both operands is peeled until stages are used again.
        return {"wgmma": products, "tma": 2 * (tiles.stages + 1) + stores, "setmaxnreg": 2}
    # The first step is peeled, copies are unrolled twice; rows of an edge are stored by powers of
    # two, a single one by another instruction.
    edges = tiles.columns // kernels.EDGE * 5
    return {"wgmma": 2 * products, "tma": 2 * 2 + stores + edges, "setmaxnreg": 2}


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [
        (kernels.WIDE, jnp.bfloat16),
        (kernels.NARROW, jnp.bfloat16),
        (kernels.WIDE, jnp.float16),
    ],
    ids=["wide", "narrow", "wide float16"],
)
def test_shipped_tiles_are_assembled_without_spills(kind, tiles, dtype):
    run, a, b = OPERANDS[kind]
    a, b = (shape(*z.shape, dtype=dtype) for z in (a, b))
    (report,) = kernel_reports(functools.partial(run, tiles=tiles), H100, a, b, SIZES)
    assert report.instructions == expected(kind, tiles)
    assert_fast(report, known=FENCE)


@pytest.mark.parametrize("kind", OPERANDS)
def test_any_number_of_rows_and_features_is_assembled(kind):
    # No multiple of a tile of shared memory; features that are padded.
    run, *_ = OPERANDS[kind]
    x, dy, w = shape(1001, 200), shape(1001, 328), shape(E, 200, 328)
    a, b = {"forward": (x, w), "by x": (dy, w), "by w": (x, dy)}[kind]
    (report,) = kernel_reports(run, H100, a, b, SIZES)
    assert report.instructions["wgmma"] and report.instructions["tma"]
    assert_fast(report, known=FENCE)


def temporary_bytes(fn):
    """Of output and gradients together."""
    mesh = Mesh(np.asarray(target_devices(H100)[:1]), ("one",))
    where = NamedSharding(mesh, PartitionSpec())

    def all_three(x, w, sizes, dy):
        out, transposed = jax.vjp(lambda x, w: fn(x, w, sizes), x, w)
        return out, *transposed(dy)

    arguments = [
        jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=where)
        for z in (shape(T, D), shape(E, D, F), SIZES, shape(T, F))
    ]
    with target("gpu", compute_capability=(9, 0)):
        compiled = jax.jit(all_three).trace(*arguments).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_no_operand_is_laid_out_per_group():
    # The schedule, starts and ends: a few integers per row tile and group.
    assert temporary_bytes(grouped_matmul) < 64 * 1024
    # Zeros for the rows of other groups, and more.
    assert temporary_bytes(jax.lax.ragged_dot) > E * T * D * 2
    # A float32 sum of w's gradient.
    by_loop = temporary_bytes(functools.partial(grouped_matmul, implementation="xla"))
    assert by_loop < 1.05 * E * D * F * 4


def test_each_device_runs_the_kernels_on_rows_of_its_own():
    mesh = Mesh(np.asarray(target_devices(parse_target("h100:1x2"))), ("data",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec(), *[PartitionSpec("data")] * 2),
        out_specs=(*[PartitionSpec("data")] * 2, PartitionSpec()),
    )
    def step(x, w, dy, sizes):
        out, transposed = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        return out, *transposed(dy)

    with target("gpu", compute_capability=(9, 0)):
        traced = jax.jit(step).trace(
            *(
                jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=NamedSharding(mesh, spec))
                for z, spec in (
                    (shape(T, D), PartitionSpec("data")),
                    (shape(E, D, F), PartitionSpec()),
                    (shape(T, F), PartitionSpec("data")),
                    (shape(2 * E, dtype=jnp.int32), PartitionSpec("data")),
                )
            )
        )
    program = traced.lower().compile().as_text()
    assert len(re.findall(r" custom-call\(.*mosaic_gpu", program)) == 3
    # The gradient of w alone is summed.
    (summed,) = collectives(program, mesh)
    assert (summed.kind, summed.axis) == ("all-reduce", "data")
