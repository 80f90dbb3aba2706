"""What the assembler says of Mosaic kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import kernel_reports, parse_target
from tests.pallas.mosaic.matmuls import KEYS, ROWS, WIDTH, scaled

pytestmark = pytest.mark.aot


def test_a_kernel_is_assembled_for_hopper_without_spills():
    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    (report,) = kernel_reports(
        functools.partial(scaled, interpret=False),
        parse_target("h100:1x1"),
        shape(2 * ROWS, WIDTH),
        shape(KEYS, WIDTH),
        shape(KEYS, WIDTH),
        shape(2 * ROWS, dtype=jnp.float32),
    )
    assert report.architecture == "sm_90a"
    assert report.spill_bytes == 0
    assert 0 < report.registers <= 255
    assert report.warnings == ()
    # One wgmma multiplies 16 of what is summed over: the width in the first, keys in the second.
    assert report.instructions == {"wgmma": WIDTH // 16 + KEYS // 16, "tma": 5, "setmaxnreg": 0}
