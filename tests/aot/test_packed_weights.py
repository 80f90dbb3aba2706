"""What products of packed weights move on a GPU that is not there: bytes of one matrix."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from colossax.aot import parse_module, parse_target, target_devices
from colossax.aot.hlo import shape_bytes
from colossax.nn.quantised.codes import Packing, quantise
from colossax.nn.quantised.forms import form_of
from colossax.nn.quantised.made import GroupedWeight, SparseWeight
from colossax.pallas.target import target
from colossax.sharding import linear
from tests.aot.test_serving_weights import running

pytestmark = [pytest.mark.aot, pytest.mark.slow]

IN, OUT = 4096, 14336
BITS = {"int4": 4 + 24 / 128, "int4-sym": 4 + 16 / 128, "2:4": 12, "1:4": 6}
"""At rest, of a number of the matrix, its values in bfloat16."""


def abstract(form, sharding):
    """The weight as shapes on a device."""
    asked = form_of(form)
    packing = Packing(
        form=asked.name,
        double=False,
        shape=(IN, OUT),
        dims=("embed", "mlp"),
        contract=1,
        group=asked.group,
    )
    w = jax.ShapeDtypeStruct((IN, OUT), jnp.bfloat16)
    shapes = jax.eval_shape(lambda w: quantise(packing, w), w)
    parts = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in shapes.items()
    }
    return (SparseWeight if asked.kept else GroupedWeight)(parts, packing)


@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("form", BITS)
def test_a_product_writes_its_matrix_once_and_reads_it_once(form, tokens):
    """Beside what is at rest: so many times what a product with bfloat16 moves."""
    on = SingleDeviceSharding(target_devices(parse_target("h100:1x1"))[0])
    x, weight = jax.ShapeDtypeStruct((tokens, IN), jnp.bfloat16, sharding=on), abstract(form, on)
    with target("gpu", compute_capability=(9, 0)):
        program = jax.jit(linear).lower(x, weight).compile()
    held = sum(math.prod(part.shape) * part.dtype.itemsize for part in weight.parts.values())
    assert held * 8 == IN * OUT * BITS[form]
    module = parse_module(program.as_text())
    moved = sum(
        shape_bytes(one.shape) + sum(map(shape_bytes, module.operand_shapes(one)))
        for one in running(module)
    )
    dense, small = 2 * IN * OUT, 2 * tokens * (IN + OUT)
    print(f"{form}, {tokens} tokens: {moved / (dense + small):.2f} of bfloat16's bytes")
    # Of few tokens the inputs are split over blocks, whose sums are added up after that.
    assert held + 2 * dense <= moved <= held + 2 * dense + dense // 8 + 6 * small
