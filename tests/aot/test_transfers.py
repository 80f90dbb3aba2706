"""Transfers between host and device memory, on text whose numbers can be done in the head."""

import dataclasses

import pytest

from colossax.aot.hlo import parse_module
from colossax.aot.lints import full_stack_copies, host_compute
from colossax.aot.transfers import (
    Transfer,
    host_arguments,
    transfer_totals,
    transfers,
)

STACK = "f32[6,8,4]{2,1,0:S(5)}"  # 768 bytes on the host
LAYER = "f32[1,8,4]{2,1,0}"  # 128 bytes on the device
ON_HOST = "f32[1,8,4]{2,1,0:S(5)}"
TRIPS = 'backend_config={"known_trip_count":{"n":"6"}}'
SLICED = f"(({STACK}, s32[]), {LAYER}, u32[])"
PLACED = f"(({STACK}, {LAYER}, s32[]), {STACK}, u32[])"

PARTS = f"""
%cutting (p: f32[6,8,4], j: s32[]) -> f32[1,8,4] {{
  %p = {STACK} parameter(0)
  %j = s32[] parameter(1)
  ROOT %cut = {LAYER} dynamic-slice(%p, %j, %j, %j), dynamic_slice_sizes={{1,8,4}}
}}

%cutting_async (p.1: f32[6,8,4], j.1: s32[]) -> f32[1,8,4] {{
  %p.1 = {STACK} parameter(0)
  %j.1 = s32[] parameter(1)
  ROOT %cut.1 = {LAYER} fusion(%p.1, %j.1), kind=kCustom, calls=%cutting
}}

%putting (q: f32[6,8,4], new: f32[1,8,4], k: s32[]) -> f32[6,8,4] {{
  %q = {STACK} parameter(0)
  %new = {LAYER} parameter(1)
  %k = s32[] parameter(2)
  ROOT %put = {STACK} dynamic-update-slice(%q, %new, %k, %k, %k)
}}

%putting_async (q.1: f32[6,8,4], new.1: f32[1,8,4], k.1: s32[]) -> f32[6,8,4] {{
  %q.1 = {STACK} parameter(0)
  %new.1 = {LAYER} parameter(1)
  %k.1 = s32[] parameter(2)
  ROOT %put.1 = {STACK} fusion(%q.1, %new.1, %k.1), kind=kCustom, calls=%putting
}}

%scaling (r: f32[6,8,4], l: s32[]) -> f32[1,8,4] {{
  %r = {STACK} parameter(0)
  %l = s32[] parameter(1)
  %cut.2 = {LAYER} dynamic-slice(%r, %l, %l, %l), dynamic_slice_sizes={{1,8,4}}
  ROOT %scaled = {LAYER} multiply(%cut.2, %cut.2)
}}

%doubling (t: f32[1,8,4]) -> f32[1,8,4] {{
  %t = {LAYER} parameter(0)
  ROOT %sum = {LAYER} add(%t, %t)
}}

%multiplying (u: f32[1,8,4]) -> f32[1,8,4] {{
  %u = {LAYER} parameter(0)
  ROOT %product = {LAYER} dot(%u, %u)
}}
"""

ADD = f"%add.1 = {LAYER} fusion(%x), kind=kLoop, calls=%doubling"
DOT = f"%dot.1 = {LAYER} fusion(%x), kind=kCustom, calls=%multiplying"
GEMM = f'%gemm.1 = {LAYER} custom-call(%x), custom_call_target="__cublas$gemm"'
FETCH = f"%s = {SLICED} async-start(%stack, %i), calls=%cutting_async"
FETCHED = f"%d = {LAYER} async-done(%s)"
STORE = f"%s = {PLACED} async-start(%stack, %x, %i), calls=%putting_async"
STORED = f"%d = {STACK} async-done(%s)"


def program(*lines: str, trips: str = TRIPS, before: tuple[str, ...] = ()) -> str:
    """A loop with these instructions, of a host stack `%stack`, a layer `%x`, a counter `%i`."""
    body = "\n".join(f"  {line}" for line in lines)
    ahead = "\n".join(f"  {line}" for line in before)
    return f"""HloModule jit_step, is_scheduled=true
{PARTS}
%body (state: (s32[], f32[6,8,4], f32[1,8,4])) -> s32[] {{
  %state = (s32[], {STACK}, {LAYER}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = {STACK} get-tuple-element(%state), index=1
  %x = {LAYER} get-tuple-element(%state), index=2
{body}
  ROOT %next = s32[] add(%i, %i)
}}

%condition (state.1: (s32[], f32[6,8,4], f32[1,8,4])) -> pred[] {{
  %state.1 = (s32[], {STACK}, {LAYER}) parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (whole: f32[6,8,4], start: s32[], first: f32[1,8,4]) -> s32[] {{
  %whole = {STACK} parameter(0)
  %start = s32[] parameter(1)
  %first = {LAYER} parameter(2)
{ahead}
  %all = (s32[], {STACK}, {LAYER}) tuple(%start, %whole, %first)
  ROOT %loop = s32[] while(%all), condition=%condition, body=%body, {trips}
}}
"""


def only(*lines: str, **how) -> Transfer:
    (found,) = transfers(program(*lines, **how))
    return found


@pytest.mark.catches("transfer-direction")
@pytest.mark.parametrize(
    ("lines", "direction", "size", "asynchronous"),
    [
        ((FETCH, FETCHED), "to_device", 128, True),
        ((STORE, STORED), "to_host", 128, True),
        (
            (
                f"%s = {SLICED} fusion-start(%stack, %i), kind=kLoop, calls=%cutting",
                f"%d = {LAYER} fusion-done(%s)",
            ),
            "to_device",
            128,
            True,
        ),
        (
            (
                f"%s = {SLICED} dynamic-slice-start(%stack, %i, %i, %i)",
                f"%d = {LAYER} dynamic-slice-done(%s)",
            ),
            "to_device",
            128,
            True,
        ),
        (
            (
                f"%s = {PLACED} dynamic-update-slice-start(%stack, %x, %i, %i, %i)",
                f"%d = {STACK} dynamic-update-slice-done(%s)",
            ),
            "to_host",
            128,
            True,
        ),
        (
            (f"%s = ({ON_HOST}, {LAYER}, u32[]) copy-start(%x)", f"%d = {ON_HOST} copy-done(%s)"),
            "to_host",
            128,
            True,
        ),
        (
            (
                f"%s = (f32[6,8,4]{{2,1,0}}, {STACK}, u32[]) copy-start(%stack)",
                "%d = f32[6,8,4]{2,1,0} copy-done(%s)",
            ),
            "to_device",
            768,
            True,
        ),
        (
            (f"%s = ({STACK}, {STACK}, u32[]) copy-start(%stack)", f"%d = {STACK} copy-done(%s)"),
            "host_to_host",
            768,
            True,
        ),
        ((f"%s = {STACK} copy(%stack)",), "host_to_host", 768, False),
        ((f"%s = {ON_HOST} copy(%x)",), "to_host", 128, False),
        (("%s = s32[]{:S(5)} copy(%i)",), "to_host", 4, False),
        (
            (f"%s = {LAYER} fusion(%stack, %i), kind=kLoop, calls=%cutting",),
            "to_device",
            128,
            False,
        ),
        (
            (f"%s = {LAYER} fusion(%stack, %i), kind=kLoop, calls=%scaling",),
            "to_device",
            128,
            False,
        ),
        (
            (f"%s = {STACK} fusion(%stack, %x, %i), kind=kLoop, calls=%putting",),
            "to_host",
            128,
            False,
        ),
        ((f"%s = {STACK} dynamic-update-slice(%stack, %x, %i, %i, %i)",), "to_host", 128, False),
        ((f"%s = {ON_HOST} dynamic-slice(%stack, %i, %i, %i)",), "host_to_host", 128, False),
    ],
)
def test_one_transfer(lines, direction, size, asynchronous):
    found = only(*lines)
    assert (found.direction, found.bytes, found.asynchronous) == (direction, size, asynchronous)
    assert (found.times, found.total_bytes, found.in_loop) == (6, 6 * size, True)
    assert found.name == "s"


@pytest.mark.parametrize(
    "line",
    [
        ADD,
        f"%s = {LAYER} copy(%x)",
        f"%s = {STACK} bitcast(%stack)",
        f'%s = {STACK} custom-call(), custom_call_target="AllocateBuffer"',
        f"%s = (s32[], {STACK}) tuple(%i, %stack)",
        f'%s = {STACK} custom-call(%stack), custom_call_target="HostExecute"',
        f'%s = {STACK} fusion(%stack), calls=%putting, attr={{_xla_compute_type="host"}}',
        f"%s = ({LAYER}, {LAYER}) all-reduce-start(%x)",
        f"%s = {LAYER} all-reduce-start(%x)",
    ],
)
def test_what_moves_nothing_between_the_memories(line):
    assert transfers(program(line)) == ()


def test_a_kernel_may_read_the_host_and_write_it():
    both = f"""HloModule jit_step

ENTRY %main (a: f32[6,8,4], b: f32[6,8,4]) -> f32[6,8,4] {{
  %a = {STACK} parameter(0)
  %b = f32[6,8,4]{{2,1,0}} parameter(1)
  ROOT %s = ({STACK}, f32[6,8,4]{{2,1,0}}) custom-call(%a, %b), custom_call_target="mine"
}}
"""
    # The results of a call that is not opened count whole, in each memory once.
    found = [(t.direction, t.in_loop) for t in transfers(both)]
    assert found == [("to_device", False), ("to_host", False)]


@pytest.mark.parametrize(
    ("between", "beside", "matmuls"),
    [
        ((), (), 0),
        ((ADD,), ("add.1",), 0),
        ((DOT,), ("dot.1",), 1),
        ((ADD, GEMM, DOT), ("add.1", "gemm.1", "dot.1"), 2),
    ],
)
def test_what_computes_beside_a_transfer(between, beside, matmuls):
    found = only(FETCH, *between, FETCHED)
    assert (found.beside, found.matmuls) == (beside, matmuls)
    late = only(FETCH, FETCHED, *between)
    assert (late.beside, late.matmuls) == ((), 0)


def test_a_loop_of_matmuls_beside_a_transfer_counts_as_one():
    inner = f"%w = s32[] while(%state), condition=%condition, body=%work, {TRIPS}"
    work = f"""%work (y: (s32[], f32[6,8,4], f32[1,8,4])) -> s32[] {{
  %y = (s32[], {STACK}, {LAYER}) parameter(0)
  %z = {LAYER} get-tuple-element(%y), index=2
  %deep = {LAYER} fusion(%z), kind=kCustom, calls=%multiplying
  ROOT %n = s32[] constant(1)
}}
"""
    text = program(FETCH, inner, FETCHED).replace("\n%body", f"\n{work}\n%body", 1)
    (found,) = transfers(text)
    assert (found.beside, found.matmuls) == (("w",), 1)


def test_times_are_products_of_trip_counts():
    once = program(FETCH, FETCHED)
    twice = once.replace("%main (", "%middle (").replace("ENTRY ", "")
    outer = f"""
ENTRY %main (o: f32[6,8,4]) -> s32[] {{
  %o = {STACK} parameter(0)
  ROOT %outer = s32[] while(%o), condition=%condition, body=%middle, {TRIPS.replace("6", "5")}
}}
"""
    (found,) = transfers(twice + outer)
    assert (found.times, found.total_bytes) == (30, 30 * 128)


def test_a_branch_counts_once_and_is_marked():
    text = f"""HloModule jit_step

%taken (a: f32[6,8,4]) -> f32[6,8,4] {{
  %a = {STACK} parameter(0)
  ROOT %c = {STACK} copy(%a)
}}

ENTRY %main (p: f32[6,8,4], i: s32[]) -> f32[6,8,4] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  ROOT %b = {STACK} conditional(%i, %p, %p), branch_computations={{%taken, %taken}}
}}
"""
    assert [(t.times, t.conditional, t.in_loop) for t in transfers(text)] == [(1, True, False)] * 2


def test_an_unknown_trip_count_is_refused_only_where_something_moves():
    assert transfers(program(ADD, trips="backend_config={}")) == ()
    with pytest.raises(ValueError, match=r"'s' copies .* loop without a known trip count"):
        transfers(program(FETCH, FETCHED, trips="backend_config={}"))


def test_of_loops_in_loops_nothing_can_be_said():
    module = parse_module(program(FETCH, FETCHED, trips="backend_config={}"))
    called = {**module.computations, "all": ()}
    nested = dataclasses.replace(module, computations=called, entry="all").with_trip_count(2)
    loops = [one for one in nested.computations[module.entry] if one.opcode == "while"]
    assert [one.trip_count for one in loops] == [None]


@pytest.mark.parametrize(("trips", "times"), [("backend_config={}", 2), (TRIPS, 6)])
def test_an_unknown_trip_count_may_be_said(trips, times):
    module = parse_module(program(FETCH, FETCHED, trips=trips)).with_trip_count(2)
    assert [one.times for one in transfers(module)] == [times]


def test_where_a_transfer_comes_from():
    where = 'metadata={op_name="jit(step)/slice" source_file="/src/a.py" source_line=3}'
    found = only(f"{FETCH}, {where}", FETCHED)
    assert (found.op_name, found.source, found.shape) == ("jit(step)/slice", "/src/a.py:3", STACK)


def test_totals():
    ahead = (f"%c = {STACK} copy(%whole)", f"%o = {ON_HOST} copy(%first)")
    text = program(
        FETCH,
        DOT,
        FETCHED,
        f"%s.2 = {SLICED} async-start(%stack, %i), calls=%cutting_async",
        ADD,
        f"%v = {LAYER} async-done(%s.2)",
        f"%w = {LAYER} fusion(%stack, %i), kind=kLoop, calls=%cutting",
        before=ahead,
    )
    up, down, within = transfer_totals(transfers(text))
    assert [t.direction for t in (up, down, within)] == ["to_device", "to_host", "host_to_host"]
    assert (up.executions, up.bytes) == (18, 18 * 128)
    assert (up.sync_in_loops, up.beside_matmul, up.exposed_bytes) == (6, 6, 6 * 128)
    assert (down.executions, down.bytes, down.sync_in_loops) == (1, 128, 0)
    assert (within.executions, within.bytes, within.exposed_bytes) == (1, 768, 768)
    assert transfer_totals(()) == ()


WHOLE_UP = "%c = f32[6,8,4]{2,1,0} copy(%whole)"


def test_full_stack_copies():
    found = parse_module(program(f"%h = {STACK} copy(%stack)", before=(WHOLE_UP,)))
    assert host_arguments(found) == (768,)
    assert full_stack_copies(found) == [
        "'c' copies a whole stack of 768 bytes, to device, 1 times",
        "'h' copies a whole stack of 768 bytes, host to host, 6 times",
    ]
    assert full_stack_copies(found, [1024]) == []
    layers = parse_module(program(FETCH, FETCHED))
    assert full_stack_copies(layers) == []
    assert full_stack_copies(layers, [128]) == []  # a slice is no whole array, whatever its size


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{LAYER} fusion(%stack, %i), kind=kLoop, calls=%scaling", "multiply"),
        (f"{LAYER} fusion(%stack, %i), kind=kLoop, calls=%cutting", None),
        (f"{STACK} fusion(%stack, %x, %i), kind=kLoop, calls=%putting", None),
        (f"{STACK} multiply(%stack, %stack)", "multiply"),
        (f"{STACK} transpose(%stack)", "transpose"),
        (f"{LAYER} multiply(%x, %x)", None),
    ],
)
def test_kernels_that_compute_from_host_memory(line, said):
    found = host_compute(parse_module(program(f"%s = {line}")))
    assert len(found) == (said is not None)
    assert all(one.endswith(f" 's' computes from host memory: {said}") for one in found)
