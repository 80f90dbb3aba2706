"""Matmuls with N:M sparse weights on an H100 that is not there: what the assembler says."""

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import kernel_reports, parse_target
from colossax.pallas.sparse_matmul.mosaic_gpu import multiply
from tests.aot.assembled import assert_fast

pytestmark = pytest.mark.aot

K, N = 4096, 14_336


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("rows", [1, 16, 32])
def test_the_kernel_is_assembled_without_spills(rows, kept):
    given = [
        jax.ShapeDtypeStruct((rows, K), jnp.bfloat16),
        jax.ShapeDtypeStruct((kept, N, K // 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((kept, N, K // 4), jnp.int8),
    ]
    (report,) = kernel_reports(multiply, parse_target("h100:1x1"), *given)
    # A product of each place over 64 fours; one wgmma multiplies 16 of what is summed over.
    assert report.instructions["wgmma"] == 4 * 64 // 16
    assert report.registers <= 168
    print(f"{rows} rows, {kept}:4: {report.registers} registers")
    assert_fast(report)
