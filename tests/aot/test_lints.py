"""Lints of compiled programs: for each, text that trips it and text that does not."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from colossax.aot.compile import Program
from colossax.aot.hlo import Module, parse_module
from colossax.aot.lints import (
    exposed_collectives,
    exposed_transfers,
    full_rematerialisations,
    host_compute,
    host_copies,
    sync_transfers_in_loops,
    unexpected_collectives,
)

STACK = "f32[8,128,1024]{2,1,0:S(5)}"  # 4 MiB on the host
SLICE = "f32[1,128,1024]{2,1,0}"  # 512 KiB on the device
WHERE = 'metadata={op_name="jit(step)/slice" source_file="/src/a.py" source_line=3}'


def loop(*lines: str) -> Module:
    """A loop whose body has these instructions behind a host stack `%stack` and a counter `%i`."""
    body = "\n".join(f"  {line}" for line in lines)
    return parse_module(f"""HloModule jit_step, is_scheduled=true

%slices (p: f32[8,128,1024], j: s32[]) -> f32[1,128,1024] {{
  %p = {STACK} parameter(0)
  %j = s32[] parameter(1)
  ROOT %cut = {SLICE} dynamic-slice(%p, %j, %j, %j), dynamic_slice_sizes={{1,128,1024}}
}}

%body (state: (s32[], f32[8,128,1024], f32[1,128,1024])) -> s32[] {{
  %state = (s32[], {STACK}, {SLICE}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = {STACK} get-tuple-element(%state), index=1
  %x = {SLICE} get-tuple-element(%state), index=2
{body}
  ROOT %next = s32[] add(%i, %i)
}}

%condition (state.1: (s32[], f32[8,128,1024], f32[1,128,1024])) -> pred[] {{
  %state.1 = (s32[], {STACK}, {SLICE}) parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (start: (s32[], f32[8,128,1024], f32[1,128,1024])) -> s32[] {{
  %start = (s32[], {STACK}, {SLICE}) parameter(0)
  ROOT %loop = s32[] while(%start), condition=%condition, body=%body
}}
""")


def entry(*lines: str) -> Module:
    """A program without a loop, of a host stack `%stack` and a device array `%x`."""
    body = "\n".join(f"  {line}" for line in lines)
    return parse_module(f"""HloModule jit_step, is_scheduled=true

%runs (p: f32[8,128,1024]) -> f32[8,128,1024] {{
  %p = {STACK} parameter(0)
  ROOT %r = {STACK} negate(%p)
}}, execution_thread="host"

ENTRY %main (stack: f32[8,128,1024], x: f32[1,128,1024]) -> f32[] {{
  %stack = {STACK} parameter(0)
  %x = {SLICE} parameter(1)
{body}
  ROOT %end = f32[] constant(0)
}}
""")


START = f"(({STACK}, s32[], s32[], s32[]), {SLICE}, u32[])"
UPDATE = f"(({STACK}, {SLICE}, s32[], s32[], s32[]), {STACK}, u32[])"
WORK = f"%work = {SLICE} fusion(%x), kind=kLoop, calls=%slices"


def said(messages: str) -> Program:
    return Program(
        hlo="", assignment="", live_ranges="", stats=None, messages=messages, compile_s=0.0
    )


NEWER = (
    "W1121 14:51:14.063091   11830 spmd_partitioner.cc:656] [SPMD] Involuntary full"
    " rematerialization. The compiler cannot go from sharding {devices=[2,1,4]<=[4,2]T(1,0)} to"
    " {devices=[1,8,1]<=[8]} efficiently for HLO operation %add.2 = f32[8,16,4]{2,1,0} add(%param,"
    ' %param), sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="jit(g)/add"'
    " stack_frame_id=2}. As the last resort, SPMD will replicate the tensor.\n"
)
OLDER = (
    "2025-04-14 17:55:24.092274: E spmd_partitioner.cc:621] [spmd] Involuntary full"
    " rematerialization. The compiler was not able to go from sharding {devices=[4,1]<=[4]} to"
    " {devices=[2,2]<=[4]} without doing a full rematerialization of the tensor. You probably want"
    " to enrich the sharding annotations to prevent this from happening.\n"
)


def test_full_rematerialisations():
    noise = "I0000 cudart_stub.cc:31] Could not find cuda drivers, rematerialization is off.\n"
    assert full_rematerialisations(said(noise)) == []
    newer, older = full_rematerialisations(said(noise + NEWER + noise + OLDER))
    assert newer == (
        "involuntary full rematerialisation: The compiler cannot go from sharding"
        " {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} efficiently for HLO operation"
        " %add.2 = f32[8,16,4]{2,1,0} add(%param, %param),"
        " sharding={devices=[2,1,4]<=[4,2]T(1,0)} (jit(g)/add)"
    )
    assert older.endswith("without doing a full rematerialization of the tensor")


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        (f"%c = {STACK} copy(%stack)", False),
        (f"%c = ({STACK}, {STACK}, u32[]) copy-start(%stack)", False),
        (f"%c = {STACK.replace(':S(5)', '')} copy(%stack)", True),
        (f"%c = ({STACK.replace(':S(5)', '')}, {STACK}, u32[]) copy-start(%stack)", True),
        (f"%c = {SLICE} copy(%x)", True),
        (f"%c = {STACK} bitcast(%stack)", True),
    ],
)
def test_copies_within_host_memory(line, clean):
    for module in (entry(f"{line}, {WHERE}"), loop(f"{line}, {WHERE}")):
        found = host_copies(module)
        assert bool(found) is not clean
        assert all("copies 4,194,304 bytes within host memory" in one for one in found)
        assert all("'c' (jit(step)/slice, /src/a.py:3)" in one for one in found)
        assert host_copies(module, larger_than=4_194_304) == []


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        (f"%c = {SLICE} fusion(%stack, %i), kind=kCustom, calls=%slices", False),
        (f"%c = {SLICE} dynamic-slice(%stack, %i, %i, %i)", False),
        (f"%c = {STACK} dynamic-update-slice(%stack, %x, %i, %i, %i)", False),
        (f"%c = {SLICE.replace('}', ':S(5)}')} copy(%x)", False),
        (f"%c = {STACK.replace(':S(5)', '')} copy(%stack)", False),
        (f"%c = ({SLICE}, {STACK}) fusion(%stack), kind=kLoop, calls=%slices", False),
        (f"%c = {START} fusion-start(%stack, %i, %i, %i), calls=%slices", True),
        (f"%c = {START} async-start(%stack, %i, %i, %i), calls=%slices", True),
        (f"%c = {UPDATE} async-start(%stack, %x, %i, %i, %i), calls=%slices", True),
        (f"%c = ({SLICE}, {SLICE.replace('}', ':S(5)}')}, u32[]) copy-start(%stack)", True),
        (f"%c = {STACK} copy(%stack)", True),  # stays on the host: another lint's business
        (f"%c = {SLICE} copy(%x)", True),
        ("%c = s32[] fusion(%i), kind=kLoop, calls=%slices", True),
        (f"%c = (s32[], {STACK}) fusion(%stack, %i), kind=kLoop, calls=%slices", True),
        (f"%c = (s32[], {STACK}, {SLICE}) tuple(%i, %stack, %x)", True),
    ],
)
def test_synchronous_transfers_in_loops(line, clean):
    found = sync_transfers_in_loops(loop(f"{line}, {WHERE}"))
    assert bool(found) is not clean
    if not clean:
        (sentence,) = found
        assert "'c' (jit(step)/slice, /src/a.py:3) moves between host and device" in sentence


def test_synchronous_transfers_outside_loops_are_left_alone():
    assert sync_transfers_in_loops(entry(f"%c = {SLICE} copy(%stack)")) == []


def test_synchronous_transfers_are_found_behind_calls_and_inner_loops():
    copy = f"%c = {STACK.replace(':S(5)', '')} copy(%stack)"
    text = "\n".join(
        [
            f"%deep (stack: f32[8,128,1024]) -> f32[] {{\n  %stack = {STACK} parameter(0)",
            f"  {copy}\n}}",
            f"%outer (s: f32[8,128,1024]) -> f32[] {{\n  %s = {STACK} parameter(0)",
            "  %called = f32[] call(%s), to_apply=%deep\n}",
            f"ENTRY %main (t: f32[8,128,1024]) -> f32[] {{\n  %t = {STACK} parameter(0)",
            "  %loop = f32[] while(%t), condition=%outer, body=%outer\n}",
        ]
    )
    assert len(sync_transfers_in_loops(parse_module(text))) == 1


@pytest.mark.parametrize(
    ("start", "done", "size"),
    [
        (f"{START} fusion-start(%stack, %i, %i, %i)", f"{SLICE} fusion-done(%c)", 524_288),
        (f"{START} async-start(%stack, %i, %i, %i)", f"{SLICE} async-done(%c)", 524_288),
        (f"{UPDATE} async-start(%stack, %x, %i, %i, %i)", f"{STACK} async-done(%c)", 524_288),
        (
            f"({STACK.replace(':S(5)', '')}, {STACK}, u32[]) copy-start(%stack)",
            f"{STACK} copy-done(%c)",
            4_194_304,
        ),
        (
            f"({SLICE.replace('}', ':S(5)}')}, {SLICE}, u32[]) copy-start(%x)",
            f"{SLICE} copy-done(%c)",
            524_288,
        ),
    ],
)
def test_exposed_transfers(start, done, size):
    begin, end = f"%c = {start}, calls=%slices, {WHERE}", f"%d = {done}"
    assert exposed_transfers(loop(begin, WORK, end)) == []
    late = loop(begin, end, WORK)
    (sentence,) = exposed_transfers(late)
    assert f"'c' (jit(step)/slice, /src/a.py:3) moves {size:,} bytes between host" in sentence
    assert exposed_transfers(late, larger_than=size) == []


@pytest.mark.parametrize(
    "line",
    [
        f"%c = ({STACK}, {STACK}, u32[]) copy-start(%stack)",
        f"%c = ({SLICE}, {SLICE}, u32[]) copy-start(%x)",
        f'%c = (({STACK}), {STACK}, u32[]) async-start(%stack), async_execution_thread="host"',
    ],
)
def test_starts_that_stay_in_one_memory_are_no_transfers(line):
    assert exposed_transfers(entry(line)) == []


MESH_TEXT = "replica_groups=mesh['a'=2,'b'=4]"


@pytest.fixture
def mesh(devices) -> Mesh:
    grid = np.array(devices).reshape(2, 4)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


REDUCE = f"f32[1,128,1024]{{2,1,0}} all-reduce-start(%x), {MESH_TEXT} {{'b'}}, {WHERE}"
GATHER = f"f32[2,128,1024]{{2,1,0}} all-gather(%x), {MESH_TEXT} {{'a'}}, dimensions={{0}}, {WHERE}"
END = "%d = f32[1,128,1024]{2,1,0} all-reduce-done(%c)"


def test_exposed_collectives(mesh):
    assert (
        exposed_collectives(entry(f"%c = {REDUCE}", WORK.replace("slices", "runs"), END), mesh)
        == []
    )
    late = entry(f"%c = {REDUCE}", END)
    assert exposed_collectives(late, mesh) == [
        "all-reduce along fsdp of 524,288 bytes is not hidden by compute"
        " (jit(step)/slice, /src/a.py:3)"
    ]
    assert exposed_collectives(late, mesh, larger_than=524_288) == []
    (sentence,) = exposed_collectives(entry(f"%c = {GATHER}"), mesh)
    assert sentence.startswith("all-gather along data of 1,048,576 bytes is not hidden")


def test_unexpected_collectives(mesh):
    module = entry(f"%c = {REDUCE}", END, f"%g = {GATHER}")
    both = {("all-reduce", "fsdp"), ("all-gather", "data")}
    assert unexpected_collectives(module, mesh, both) == []
    wrong_axis = {("all-reduce", "data"), ("all-gather", "data")}
    assert unexpected_collectives(module, mesh, wrong_axis) == [
        "all-reduce along fsdp of 524,288 bytes is not expected (jit(step)/slice, /src/a.py:3)"
    ]
    (wrong_kind,) = unexpected_collectives(module, mesh, {("all-reduce", "fsdp")})
    assert wrong_kind.startswith("all-gather along data of 1,048,576 bytes is not expected")
    assert len(unexpected_collectives(module, mesh, ())) == 2
    assert len(unexpected_collectives(module, mesh, (), larger_than=524_288)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            f'%c = {STACK} custom-call(%stack), custom_call_target="HostExecute",'
            f" called_computations={{%runs}}",
            "custom call to HostExecute",
        ),
        (
            '%c = () custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"',
            "custom call to xla_ffi_python_gpu_callback",
        ),
        (
            f"%c = {STACK} call(%stack), to_apply=%runs,"
            f' frontend_attributes={{_xla_compute_type="host"}}',
            "annotated so",
        ),
        ("%c = ((f32[]), token[]) infeed(%x)", "infeed"),
        (
            "%c = (f32[], u32[], token[]) send(%x), channel_id=1, is_host_transfer=true",
            "it exchanges values with a callback",
        ),
    ],
)
def test_host_compute(line, reason):
    (sentence,) = host_compute(entry(f"{line}, {WHERE}"))
    assert sentence.endswith(f"'c' (jit(step)/slice, /src/a.py:3) runs on the host: {reason}")


@pytest.mark.parametrize(
    "line",
    [
        f'%c = {STACK} custom-call(), custom_call_target="AllocateBuffer"',
        f'%c = {SLICE} custom-call(%x), custom_call_target="__cublas$gemm"',
        f'%c = {SLICE} fusion(%x), calls=%runs, frontend_attributes={{_xla_compute_type="sparse"}}',
        f"%c = {STACK} copy(%stack)",
    ],
)
def test_device_compute_is_no_host_compute(line):
    assert host_compute(entry(line)) == []


def test_callback_of_a_compiled_program_is_found():
    def step(x):
        jax.debug.callback(lambda _: None, x)
        return x + 1

    def module(function):
        text = jax.jit(function).lower(jax.ShapeDtypeStruct((8,), np.float32)).compile().as_text()
        return parse_module(text)

    (sentence,) = host_compute(module(step))
    assert "callback" in sentence
    assert host_compute(module(lambda x: x + 1)) == []
