"""Matmuls with weights of four bits on an H100 that is not there: what the assembler says."""

import functools

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import kernel_reports, parse_target
from colossax.pallas.int4_matmul.mosaic_gpu import multiply
from tests.aot.assembled import assert_fast

pytestmark = pytest.mark.aot

K, N = 4096, 14_336


CASES = [(m, z, jnp.bfloat16) for m in (1, 16, 32) for z in (False, True)]


@pytest.mark.parametrize(("rows", "zeros", "scales"), [*CASES, (16, True, jnp.float16)])
def test_the_kernel_is_assembled_without_spills(rows, zeros, scales):
    codes = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint8)
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    of_groups = jax.ShapeDtypeStruct((K // 128, N), scales)
    given = [numbers((rows, K)), codes((K // 2, N)), of_groups]
    given += [codes((K // 128, N))] if zeros else []

    def run(x, codes, scales, zeros=None):
        return multiply(x, codes, scales, zeros)

    (report,) = kernel_reports(run, parse_target("h100:1x1"), *given)
    # Two products over 64 inputs; one wgmma multiplies 16 of what is summed over.
    assert report.instructions["wgmma"] == 2 * 64 // 16
    # Two blocks on a multiprocessor, of 384 threads each.
    assert report.registers <= 80
    assert_fast(report)
