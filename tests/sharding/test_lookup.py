"""Table look-ups equal indexing, values and gradients, wherever table and tokens are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.aot import collectives
from colossax.config import Plan, Precision, preset
from colossax.sharding import constrain, lookup, use
from tests.cases import quick_first

D = 64
MESHES = {
    "fsdp8": preset("zero3", mesh={"fsdp": 8}),
    "fsdp2-tensor4": preset("zero3+megatron", mesh={"fsdp": 2, "tensor": 4}),
    "data4-tensor2": preset("zero3+megatron", mesh={"data": 4, "tensor": 2}),
    "tensor8": preset("megatron", mesh={"tensor": 8}),
    "sp-fsdp2-tensor4": preset("zero3+megatron_sp", mesh={"fsdp": 2, "tensor": 4}),
    "zero1-data2-fsdp2-tensor2": preset(
        "zero1+megatron_sp", mesh={"data": 2, "fsdp": 2, "tensor": 2}
    ),
    "ring8": preset("ddp", mesh={"ring": 8}),
    "ring2-ulysses2-fsdp2": preset("zero3", mesh={"ring": 2, "ulysses": 2, "fsdp": 2}),
    "ring2-tensor2-fsdp2": preset("zero3+megatron_sp", mesh={"ring": 2, "tensor": 2, "fsdp": 2}),
    "2d-2x4": Plan(mesh={"row": 2, "col": 4}, tensor_layout="2d"),
    "2d-fsdp2": Plan(mesh={"fsdp": 2, "row": 2, "col": 2}, tensor_layout="2d"),
    "2d-ring2": Plan(mesh={"ring": 2, "row": 2, "col": 2}, tensor_layout="2d"),
    "2.5d": Plan(mesh={"depth": 2, "row": 2, "col": 2}, tensor_layout="2.5d"),
    "3d": Plan(mesh={"depth": 2, "row": 2, "col": 2}, tensor_layout="3d"),
    "stage4-fsdp2": Plan(mesh={"stage": 4, "fsdp": 2}),
    "stage2-fsdp2-tensor2": Plan(mesh={"stage": 2, "fsdp": 2, "tensor": 2}),
    "3d-fsdp2": Plan(mesh={"fsdp": 2, "row": 2, "col": 2}, tensor_layout="3d"),
}


def operands(rows):
    """With numbers beyond the table, which read its last row."""
    table = jax.random.normal(jax.random.key(0), (rows, D))
    ids = jax.random.randint(jax.random.key(1), (8, 8), -rows // 8, rows + rows // 8)
    return table, jnp.maximum(ids, 0), jax.random.normal(jax.random.key(2), (8, 8, D))


def program(dims, ids, scale):
    def total(table):
        out = lookup(table, ids, dims)
        return jnp.sum(constrain(out, "batch", "seq:residual", "embed") * scale), out

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@functools.cache
def truth(rows):
    """Operands, the rows that are read, and the gradient of the table."""
    table, ids, scale = operands(rows)
    inside = jnp.minimum(ids, rows - 1)
    gradient = jax.grad(lambda table: jnp.sum(table[inside] * scale))(table)
    return (table, ids, scale), table[inside], gradient


TABLES = {
    f"{dims[0]}, {what} move": (dims, rows)
    for dims in (("vocab", "embed:table"), ("positions", "embed"))
    for rows, what in ((16, "tables"), (512, "rows"))
}


@pytest.mark.catches("lookup-width-of-another-stage")
@pytest.mark.parametrize("mesh", quick_first(MESHES, 3))
def test_lookup_equals_indexing_without_rematerialisation(devices, mesh, capfd):
    """Of every kind of table, in one program that is compiled once."""
    right = {name: truth(rows) for name, (_, rows) in TABLES.items()}

    @jax.jit
    def every(tables):
        found = {}
        for name, (dims, _) in TABLES.items():
            _, ids, scale = right[name][0]
            found[name] = program(dims, ids, scale)(tables[name])
        return found

    with use(MESHES[mesh].bind(devices)):
        found = every({name: arrays[0] for name, (arrays, _, _) in right.items()})
    for name, (_, read, want) in right.items():
        (_, out), got = found[name]
        np.testing.assert_array_equal(out, read, err_msg=name)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.catches("lookup-beyond-table")
@pytest.mark.parametrize("mesh", ["fsdp8", "sp-fsdp2-tensor4", "2d-fsdp2", "3d"])
def test_lookup_in_bfloat16(devices, mesh):
    (table, ids, scale), _, want = truth(512)
    plan = MESHES[mesh].replace(precision=Precision(compute="bfloat16"))
    with use(plan.bind(devices)):
        (_, out), got = program(("vocab", "embed"), ids, scale)(table)
    assert (out.dtype, got.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


T = 8 * 8 // 8
"""Tokens of a device where all split them."""


@pytest.mark.catches("table-of-stages-by-rows")
@pytest.mark.parametrize(
    ("mesh", "rows", "expected"),
    [
        ("fsdp8", 512, {("all-to-all", "fsdp"): 2 * T * D}),
        ("fsdp8", 8, {("all-gather", "fsdp"): 8 * D, ("reduce-scatter", "fsdp"): 8 * D}),
        # The first gathers what the stages have of the width; back each has its own.
        (
            "stage4-fsdp2",
            512,
            {("all-gather", "stage"): 4 * T * D, ("all-to-all", "fsdp"): 2 * (8 * T) * D / 8},
        ),
        # Forward scattered along row, backward gathered; along fsdp exchanged both times.
        (
            "2d-fsdp2",
            512,
            {
                ("reduce-scatter", "row"): 2 * (2 * T) * D / 2,
                ("all-gather", "row"): 2 * (2 * T) * D / 2,
                ("all-to-all", "fsdp"): 2 * (2 * T) * D / 2,
            },
        ),
        (
            "2.5d",
            16,
            {
                ("all-gather", "row"): 16 * D / 2,
                ("reduce-scatter", "row"): 16 * D / 2,
                ("all-reduce", "depth"): 16 * D / 4,
            },
        ),
        (
            "3d",
            16,
            {
                ("all-gather", "depth x row"): 16 * D / 2,
                ("reduce-scatter", "depth x row"): 16 * D / 2,
            },
        ),
    ],
)
def test_what_a_lookup_sends(devices, mesh, rows, expected):
    table, ids, scale = operands(rows)
    bound = MESHES[mesh].bind(devices)
    dims = "vocab", "embed:table"
    with use(bound):
        text = program(dims, ids, scale).lower(table).compile().as_text()
    sent = {}
    for one in collectives(text, bound.mesh):
        if one.bytes > 600:  # numbers of rows, the sum of the test's own total
            key = one.kind, one.axis
            sent[key] = sent.get(key, 0) + one.bytes / 4
    assert sent == expected
