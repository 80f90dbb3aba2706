"""Bytes that programs move, on text whose numbers can be done in the head."""

import jax
import numpy as np
import pytest

from colossax.aot.traffic import traffic

# fmt: off
TEXT = r"""HloModule jit_step, is_scheduled=true

%twice (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %sum = f32[8]{0} add(%p0, %p1)
}

%cut (stack: f32[6,8], i: s32[]) -> f32[8] {
  %stack = f32[6,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
  ROOT %row = f32[8]{0} bitcast(%one)
}

%put (all: f32[6,8], new: f32[8], j: s32[]) -> (f32[6,8], f32[]) {
  %all = f32[6,8]{1,0} parameter(0)
  %new = f32[8]{0} parameter(1)
  %j = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %wide = f32[1,8]{1,0} bitcast(%new)
  %updated = f32[6,8]{1,0} dynamic-update-slice(%all, %wide, %j, %zero.1)
  %number = f32[] constant(1)
  ROOT %both = (f32[6,8]{1,0}, f32[]) tuple(%updated, %number)
}

%body (state: (s32[], f32[6,8])) -> (s32[], f32[6,8]) {
  %state = (s32[], f32[6,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %held = f32[6,8]{1,0} get-tuple-element(%state), index=1
  %cutting = f32[8]{0} fusion(%held, %count), kind=kLoop, calls=%cut, metadata={op_name="jit(step)/row"}
  %putting = (f32[6,8]{1,0}, f32[]) fusion(%held, %cutting, %count), kind=kLoop, calls=%put
  %next = f32[6,8]{1,0} get-tuple-element(%putting), index=0
  ROOT %out = (s32[], f32[6,8]{1,0}) tuple(%count, %next)
}

%condition (state.1: (s32[], f32[6,8])) -> pred[] {
  %state.1 = (s32[], f32[6,8]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%count.1, %count.1), direction=LT
}

%recorded (r: bf16[8]) -> bf16[8] {
  %r = bf16[8]{0} parameter(0)
  ROOT %negated = bf16[8]{0} negate(%r)
}

ENTRY %main (x: f32[8], y: f32[8], many: f32[6,8], h: bf16[8]) -> (f32[8], f32[6,8]) {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %many = f32[6,8]{1,0} parameter(2)
  %h = bf16[8]{0} parameter(3)
  %two = f32[8]{0} fusion(%x, %y), kind=kLoop, calls=%twice
  %same = f32[8]{0} fusion(%x, %x), kind=kLoop, calls=%twice
  %start = s32[] constant(0)
  %copying = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%two)
  %copied = f32[8]{0:S(5)} copy-done(%copying)
  %before = (s32[], f32[6,8]{1,0}) tuple(%start, %many)
  %loop = (s32[], f32[6,8]{1,0}) while(%before), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %after = f32[6,8]{1,0} get-tuple-element(%loop), index=1
  %called = bf16[8]{0} call(%h), to_apply=%recorded
  ROOT %end = (f32[8]{0}, f32[6,8]{1,0}) tuple(%same, %loop#1)
}
"""  # noqa: E501
# fmt: on

ROW = 32


@pytest.fixture(scope="module")
def found():
    return {one.name: one for one in traffic(TEXT)}


def test_only_what_moves_bytes_is_there(found):
    names = "two same copying copied less cutting putting negated"
    assert sorted(found) == sorted(names.split())


def test_operands_and_results_count_once(found):
    assert (found["two"].read_bytes, found["two"].written_bytes) == (2 * ROW, ROW)
    assert (found["same"].read_bytes, found["same"].written_bytes) == (ROW, ROW)
    assert found["same"].bytes == 2 * ROW


def test_asynchronous_pairs_read_at_the_start_and_write_at_the_end(found):
    assert (found["copying"].read_bytes, found["copying"].written_bytes) == (ROW, 0)
    assert (found["copied"].read_bytes, found["copied"].written_bytes) == (0, ROW)


def test_loops_move_slices_as_often_as_they_run(found):
    cutting, putting = found["cutting"], found["putting"]
    assert cutting.count == putting.count == 6
    assert (cutting.read_bytes, cutting.written_bytes) == (6 * (ROW + 4), 6 * ROW)
    assert (putting.read_bytes, putting.written_bytes) == (6 * (ROW + 4), 6 * (ROW + 4))
    assert cutting.op_name == "jit(step)/row"
    assert found["less"].count == 7


def test_what_is_called_counts_by_its_instructions(found):
    assert (found["negated"].read_bytes, found["negated"].written_bytes) == (16, 16)


def test_part_of_a_tuple_is_that_part():
    text = TEXT.replace("fusion(%x, %y)", "fusion(%x, %many#0)").replace(
        "%many = f32[6,8]{1,0} parameter(2)", "%many = (f32[8]{0}, f32[6,8]{1,0}) parameter(2)"
    )
    assert next(one for one in traffic(text) if one.name == "two").read_bytes == 2 * ROW


def test_slices_outside_of_fusions():
    text = """ENTRY %e (p: f32[6,8], q: f32[1,8], i: s32[]) -> f32[6,8] {
  %p = f32[6,8]{1,0} parameter(0)
  %q = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %cut = f32[1,8]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %put = f32[6,8]{1,0} dynamic-update-slice(%p, %q, %i, %i)
}
"""
    cut, put = traffic(text)
    assert (cut.read_bytes, cut.written_bytes) == (ROW + 4, ROW)
    assert (put.read_bytes, put.written_bytes) == (ROW + 4, ROW)


def test_loop_of_unknown_length_is_refused():
    text = TEXT.replace('"known_trip_count":{"n":"6"}', "")
    with pytest.raises(ValueError, match="loop 'loop' has no known trip count"):
        traffic(text)


def test_a_program_of_this_machine():
    """A matmul reads two squares and writes one, ten times."""
    n = 128

    def f(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=10)[0]

    shape = jax.ShapeDtypeStruct((n, n), np.float32)
    found = traffic(jax.jit(f).lower(shape, shape).compile().as_text())
    products = [one for one in found if one.read_bytes == 10 * 2 * n * n * 4]
    assert [one.written_bytes for one in products] == [10 * n * n * 4]
