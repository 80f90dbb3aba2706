"""What the assembler says of the kernels of attention's backward pass, in every shipped shape."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import kernel_reports, parse_target
from colossax.pallas.attention.mosaic_gpu.backward import gradients
from colossax.pallas.attention.mosaic_gpu.backward_operands import BackwardVisits, compute_registers
from colossax.pallas.attention.mosaic_gpu.backward_tiles import HEAD_SIZES, tiles_for
from tests.aot.assembled import assert_fast, stacked

pytestmark = pytest.mark.aot

# One head and row each: loops over them are unrolled, which would count copies twice. Where there
# are two heads, each has blocks of its own for the keys of both.
B, S, N = 1, 1920, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    half: type = jnp.bfloat16
    dtype: type = jnp.bfloat16
    bias: type | None = None
    soft_cap: float | None = None
    heads: int = N
    stepped: bool = False


CASES = {
    "plain": Case(),
    "float32 out": Case(half=jnp.float16, dtype=jnp.float32),
    "step of a ring": Case(dtype=jnp.float32, stepped=True),
    "step of a ring, soft cap": Case(dtype=jnp.float32, soft_cap=50.0, stepped=True),
    "step of a ring, two heads": Case(dtype=jnp.float32, heads=2, stepped=True),
    "soft cap": Case(soft_cap=50.0),
    "bias": Case(bias=jnp.bfloat16),
    "two heads, one kv head": Case(heads=2),
    "all": Case(dtype=jnp.float32, bias=jnp.float32, soft_cap=50.0),
}


def expected(h, hv, case):
    """Instructions by kernel; every loop over tiles is there with a mask and without."""
    tiles = tiles_for(h, hv, biased=case.bias is not None, soft_cap=case.soft_cap is not None)
    biased, stored = case.bias is not None, case.dtype != jnp.float32
    added = case.heads > 1  # in float32, which goes from registers to memory
    rows, columns, both = tiles.of_queries, tiles.of_keys, h // 16 + hv // 16
    found = {
        "attention_dq": {
            "wgmma": 2 * (both + rows.keys // 16),
            "tma": (2 + biased) * rows.warpgroups + 2 + stored,
            "setmaxnreg": 2,
        }
    }
    of_scores = both + (h // 16 if columns.apart else 0)
    parts = columns.keys // 64
    found["attention_dk_dv"] = {
        "wgmma": 2 * (of_scores + 2 * columns.queries // 16),
        "tma": (2 + biased) * parts + 4 + 2 * (stored and not added),
        "setmaxnreg": 3 if columns.apart else 2,
    }
    if biased:
        found["attention_dbias"] = {
            "wgmma": 2 * both,
            "tma": 3 * tiles.of_bias.warpgroups + 2,
            "setmaxnreg": 2,
        }
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("h", "hv"), HEAD_SIZES)
def test_kernels_fit_the_registers_and_shared_memory_of_hopper(h, hv, name):
    case = CASES[name]

    def shape(*sizes, dtype=case.half):
        return jax.ShapeDtypeStruct(sizes, dtype)

    tiles = tiles_for(h, hv, biased=case.bias is not None, soft_cap=case.soft_cap is not None)

    def run(q, k, v, dout, lo, hi, lse, delta, *bias):
        visits = BackwardVisits.of(lo, hi, S, tiles, case.bias is not None)
        return gradients(
            q,
            k,
            v,
            visits=stacked(visits) if case.stepped else visits,
            bias=bias[0] if bias else None,
            dout=dout,
            lse=lse,
            delta=delta,
            scale=0.1,
            soft_cap=case.soft_cap,
            dtype=case.dtype,
        )

    heads = case.heads
    bound, row = shape(1, S, dtype=jnp.int32), shape(B, heads, S, dtype=jnp.float32)
    wide, narrow = [shape(B, S, heads, h), shape(B, S, N, h)], shape(B, S, N, hv)
    arguments = [*wide, narrow, shape(B, S, heads, hv), bound, bound, row, row]
    if case.bias is not None:
        arguments.append(shape(B, heads, S, S, dtype=case.bias))
    # More shared memory than there is fails to compile.
    reports = kernel_reports(run, parse_target("h100:1x1"), *arguments)
    found = {}
    for report in reports:
        found[next(x for x in expected(h, hv, case) if report.name.startswith(x))] = report
    counts = {kernel: report.instructions for kernel, report in found.items()}
    assert counts == expected(h, hv, case)
    for kernel, report in found.items():
        # A stride of heads or of steps is two registers that head size 256 has not.
        more = case.heads > 1 or case.stepped
        spilled = 16 if (kernel, h) == ("attention_dq", 256) and more else 0
        assert_fast(report, kernel, spill_bytes=spilled)
        # An "increase" to fewer than a thread starts with is not defined.
        assert report.registers <= compute_registers(1), kernel
