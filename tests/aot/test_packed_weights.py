"""What products of packed weights move on a GPU that is not there: bytes of one matrix."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from colossax.aot import parse_module, parse_target, target_devices
from colossax.aot.hlo import shape_bytes
from colossax.config import Plan
from colossax.nn.quantised.codes import Packing, quantise
from colossax.nn.quantised.forms import form_of
from colossax.nn.quantised.made import GroupedWeight, SparseWeight
from colossax.pallas.target import target
from colossax.sharding import linear
from tests.aot.test_serving_weights import FEW, TWO_LAYERS, arrays, running
from tests.aot.test_serving_weights import compiled as engine_compiled

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


def compiled(form, tokens, capability):
    """A product as a program, and the weight's bytes at rest."""
    on = SingleDeviceSharding(target_devices(parse_target("h100:1x1"))[0])
    x, weight = jax.ShapeDtypeStruct((tokens, IN), jnp.bfloat16, sharding=on), abstract(form, on)
    with target("gpu", compute_capability=capability):
        program = jax.jit(linear).lower(x, weight).compile()
    held = sum(math.prod(part.shape) * part.dtype.itemsize for part in weight.parts.values())
    assert held * 8 == IN * OUT * BITS[form]
    return parse_module(program.as_text()), held


def moved_bytes(module):
    """What all that runs reads and writes."""
    return sum(
        shape_bytes(one.shape) + sum(map(shape_bytes, module.operand_shapes(one)))
        for one in running(module)
    )


@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("form", BITS)
def test_a_product_writes_its_matrix_once_and_reads_it_once(form, tokens):
    """Beside what is at rest, where no kernel is: so many times what one with bfloat16 moves."""
    module, held = compiled(form, tokens, (8, 0))
    moved, dense, small = moved_bytes(module), 2 * IN * OUT, 2 * tokens * (IN + OUT)
    print(f"{form}, {tokens} tokens: {moved / (dense + small):.2f} of bfloat16's bytes")
    # Of few tokens the inputs are split over blocks, whose sums are added up after that.
    assert held + 2 * dense <= moved <= held + 2 * dense + dense // 8 + 6 * small


def kernels(module):
    """Calls of our own kernels of such products."""
    return [
        one
        for one in running(module)
        if one.opcode == "custom-call" and "matmul_kernel" in one.op_name
    ]


@pytest.mark.parametrize("form", BITS)
def test_the_kernel_reads_what_is_at_rest_and_writes_no_matrix(form):
    """Of 16 tokens."""
    module, held = compiled(form, 16, (9, 0))
    moved, dense = moved_bytes(module), 2 * IN * OUT
    print(f"{form}, 16 tokens: {moved / held:.2f} of its own bytes, {moved / dense:.2f} of bf16's")
    assert len(kernels(module)) == 1
    assert held < moved <= 1.3 * held
    assert not [text for one in running(module) for _, n, text in arrays(one.shape) if n >= IN**2]


MESHES = {"h100:1x1": Plan(), "h100:1x4": Plan(mesh={"tensor": 4})}


@pytest.mark.parametrize(
    ("on", "form"), [("h100:1x1", "int4"), ("h100:1x4", "int4"), ("h100:1x4", "2:4")]
)
def test_an_engine_decodes_by_kernels_and_writes_no_matrix(on, form):
    """Seven maps of each of two layers, on each device; a matrix has more numbers than a `q`."""
    program, _, _ = engine_compiled(TWO_LAYERS, MESHES[on], FEW, on, "decode", form=form)
    module = parse_module(program.hlo)
    assert len(kernels(module)) == 2 * 7
    of_q = 4096 * 4096 // MESHES[on].mesh.get("tensor", 1)
    written = [a for one in running(module) for a in arrays(one.shape) if a[0] == "bf16"]
    assert not [text for _, numbers, text in written if numbers >= of_q]
