"""Counts, bytes and mesh axes of collectives: golden text, and small programs compiled for CPU."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from colossax.aot import parse_module
from colossax.aot.collectives import assert_collectives, collectives, totals


def mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def program(*lines: str, others: str = "") -> str:
    """A compiled program whose entry has these instructions behind `%x` of 1 KiB."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_f, is_scheduled=true\n\n{others}\n"
        "%add (lhs: f32[], rhs: f32[]) -> f32[] {\n"
        "  %lhs = f32[] parameter(0)\n"
        "  %rhs = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%lhs, %rhs)\n"
        "}\n\n"
        f"ENTRY %main (x: f32[256]) -> f32[256] {{\n  %x = f32[256]{{0}} parameter(0)\n{body}\n}}\n"
    )


def only(text: str, on: Mesh | None = None):
    """The one collective of a program."""
    (found,) = collectives(text, on or mesh(data=2, fsdp=4))
    return found


FSDP = "channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true"
PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
KIB = 1024


@pytest.mark.catches("ring-share")
@pytest.mark.parametrize(
    ("line", "kind", "payload", "ring"),
    [
        (
            f"%c = f32[1024]{{0}} all-gather(%x), {FSDP}, dimensions={{0}}",
            "all-gather",
            4 * KIB,
            3 * KIB,
        ),
        (
            f"%c = f32[256]{{0}} all-reduce(%x), {FSDP}, to_apply=%add",
            "all-reduce",
            KIB,
            1.5 * KIB,
        ),
        (
            f"%c = f32[64]{{0}} reduce-scatter(%x), {FSDP}, dimensions={{0}}, to_apply=%add",
            "reduce-scatter",
            KIB,
            0.75 * KIB,
        ),
        (
            f"%c = f32[256]{{0}} all-to-all(%x), {FSDP}, dimensions={{0}}",
            "all-to-all",
            KIB,
            0.75 * KIB,
        ),
        (f"%c = f32[256]{{0}} collective-permute(%x), {PAIRS}", "collective-permute", KIB, KIB),
        (f"%c = f32[256]{{0}} collective-broadcast(%x), {FSDP}", "collective-broadcast", KIB, KIB),
        (
            f"%c = f32[256]{{0}} ragged-all-to-all(%x, %x, %x, %x, %x, %x), {FSDP}",
            "ragged-all-to-all",
            KIB,
            0.75 * KIB,
        ),
        (
            f"%c = (f32[1024]{{0}}, f32[1024]{{0}}) all-gather(%x, %x), {FSDP}, dimensions={{0}}",
            "all-gather",
            8 * KIB,
            6 * KIB,
        ),
        (
            f"%c = (f32[256]{{0}}, f32[256]{{0}}) all-reduce(%x, f32[256]{{0}} %x), {FSDP},"
            f" to_apply=%add",
            "all-reduce",
            2 * KIB,
            3 * KIB,
        ),
        (
            f"%c = (f32[64]{{0}}, f32[64]{{0}}) all-to-all(%x, %x), {FSDP}",
            "all-to-all",
            2 * KIB,
            1.5 * KIB,
        ),
    ],
)
def test_synchronous_forms(line, kind, payload, ring):
    found = only(program(line))
    assert (found.kind, found.axes, found.axis) == (kind, ("fsdp",), "fsdp")
    assert (found.count, found.group_size, found.bytes) == (1, 4, payload)
    assert found.ring_bytes == ring
    assert found.overlapped is None
    assert not found.conditional


@pytest.mark.parametrize(
    ("shape", "opcode", "operands", "attributes", "payload"),
    [
        ("(f32[256]{0}, f32[1024]{0})", "all-gather", "%x", FSDP, 4 * KIB),
        (
            "((f32[256]{0}, f32[256]{0}), (f32[1024]{0}, f32[1024]{0}))",
            "all-gather",
            "%x, %x",
            FSDP,
            8 * KIB,
        ),
        ("f32[256]{0}", "all-reduce", "%x", f"{FSDP}, to_apply=%add", KIB),
        (
            "(f32[256]{0}, f32[256]{0})",
            "all-reduce",
            "%x, %x",
            f"{FSDP}, to_apply=%add",
            2 * KIB,
        ),
        (
            "((f32[256]{0}), f32[64]{0})",
            "reduce-scatter",
            "%x",
            f"{FSDP}, to_apply=%add",
            KIB,
        ),
        (
            "((f32[256]{0}, f32[256]{0}), (f32[64]{0}, f32[64]{0}))",
            "reduce-scatter",
            "%x, %x",
            f"{FSDP}, to_apply=%add",
            2 * KIB,
        ),
        ("((f32[256]{0}), f32[256]{0})", "all-to-all", "%x", FSDP, KIB),
        ("(f32[256]{0}, f32[256]{0})", "collective-permute", "%x", PAIRS, KIB),
        ("(f32[256]{0}, f32[256]{0}, u32[], u32[])", "collective-permute", "%x", PAIRS, KIB),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_pairs_of_start_and_done_count_once(shape, opcode, operands, attributes, payload, busy):
    between = ["%work = f32[256]{0} negate(%x)"] if busy else []
    found = only(
        program(
            f"%c = {shape} {opcode}-start({operands}), {attributes}",
            *between,
            f"%d = f32[256]{{0}} {opcode}-done(%c)",
        )
    )
    assert (found.kind, found.count, found.bytes) == (opcode, 1, payload)
    assert found.overlapped is busy


WRAPPED = f"""%wrapped (p: f32[256]) -> f32[64] {{
  %p = f32[256]{{0}} parameter(0)
  ROOT %inner = f32[64]{{0}} reduce-scatter(%p), {FSDP}, dimensions={{0}}, to_apply=%add
}}
"""
ASYNC = "((f32[256]{0}), f32[64]{0})"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("done", ["async-done(%c)", "async-done(%c), calls=%wrapped"])
def test_generic_start_runs_the_computation_it_calls(busy, done):
    between = ["%work = f32[256]{0} negate(%x)"] if busy else []
    start = f"%c = {ASYNC} async-start(%x), calls=%wrapped"
    found = only(program(start, *between, f"%d = f32[64]{{0}} {done}", others=WRAPPED))
    assert (found.kind, found.axis, found.count, found.bytes) == ("reduce-scatter", "fsdp", 1, KIB)
    assert found.overlapped is busy


def test_generic_start_with_an_update_between():
    text = program(
        f"%c = {ASYNC} async-start(%x), calls=%wrapped",
        f"%u = {ASYNC} async-update(%c), calls=%wrapped",
        "%d = f32[64]{0} async-done(%u), calls=%wrapped",
        "%work = f32[256]{0} negate(%x)",
        others=WRAPPED,
    )
    assert only(text).overlapped is False


@pytest.mark.catches("counter-hides")
@pytest.mark.parametrize(
    ("between", "busy"),
    [
        ("%g = f32[256]{0} bitcast(%x)", False),
        ("%g = s32[] add(%i, %i)", False),  # a loop's counter
        ("%g = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%x)", False),
        (f"%g = f32[256]{{0}} all-reduce(%x), {FSDP}, to_apply=%add", False),
        ("%g = f32[] reduce(%x, %i), dimensions={0}, to_apply=%add", True),
        ("%g = f32[256]{0} fusion(%x), kind=kLoop, calls=%add", True),
    ],
)
def test_what_hides_a_collective(between, busy):
    text = program(
        "%i = s32[] constant(0)",
        f"%c = f32[256]{{0}} all-reduce-start(%x), {FSDP}, to_apply=%add",
        between,
        "%d = f32[256]{0} all-reduce-done(%c)",
    )
    assert collectives(text, mesh(data=2, fsdp=4))[0].overlapped is busy


def test_a_start_without_an_end_is_refused():
    text = program(f"%c = f32[256]{{0}} all-reduce-start(%x), {FSDP}, to_apply=%add")
    with pytest.raises(ValueError, match=r"HLO line \d+: nothing ends 'c'"):
        collectives(text, mesh(data=2, fsdp=4))


def loop_text(outer: str, inner: str = "", *, condition: str = "") -> str:
    """A loop with a collective, around a loop with another; the attributes tell how often."""
    others = f"""%inner_body (q: f32[256]) -> f32[256] {{
  %q = f32[256]{{0}} parameter(0)
  ROOT %permuted = f32[256]{{0}} collective-permute(%q), {PAIRS}
}}

%never (q1: f32[256]) -> pred[] {{
  %q1 = f32[256]{{0}} parameter(0)
  {condition or "%nothing = f32[] constant(0)"}
  ROOT %no = pred[] constant(false)
}}

%always (q2: f32[256]) -> pred[] {{
  %q2 = f32[256]{{0}} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%outer_body (r: f32[256]) -> f32[256] {{
  %r = f32[256]{{0}} parameter(0)
  %reduced = f32[256]{{0}} all-reduce(%r), {FSDP}, to_apply=%add
  ROOT %loop.1 = f32[256]{{0}} while(%reduced), condition=%always, body=%inner_body{inner}
}}
"""
    return program(
        f"%loop = f32[256]{{0}} while(%x), condition=%never, body=%outer_body{outer}",
        others=others,
    )


def trips(count: int) -> str:
    return f', backend_config={{"known_trip_count":{{"n":"{count}"}},"known_init_step":{{}}}}'


@pytest.mark.catches("loops-once")
def test_bodies_of_nested_loops_are_multiplied():
    reduced, permuted = collectives(loop_text(trips(5), trips(3)), mesh(data=2, fsdp=4))
    assert (reduced.kind, reduced.count, reduced.bytes) == ("all-reduce", 5, 5 * KIB)
    assert (permuted.kind, permuted.count, permuted.bytes) == ("collective-permute", 15, 15 * KIB)
    assert (reduced.ring_bytes, permuted.ring_bytes) == (7.5 * KIB, 15 * KIB)


@pytest.mark.parametrize(
    ("outer", "inner", "loop", "sent"),
    [("", trips(3), "loop", "reduced"), (trips(5), "", r"loop\.1", "permuted")],
)
def test_loop_with_collectives_and_unknown_trips_is_refused(outer, inner, loop, sent):
    message = rf"HLO line \d+: loop '{loop}' has no known trip count and runs {sent}"
    with pytest.raises(ValueError, match=message):
        collectives(loop_text(outer, inner), mesh(data=2, fsdp=4))


def test_unknown_trips_may_be_said():
    found = collectives(
        parse_module(loop_text("", trips(3))).with_trip_count(2), mesh(data=2, fsdp=4)
    )
    assert [one.count for one in found] == [2, 6]


def test_a_condition_runs_once_more_than_its_body():
    sent = f"%s = f32[256]{{0}} all-reduce(%q1), {FSDP}, to_apply=%add"
    text = loop_text(trips(5), trips(3), condition=sent)
    found = {(c.kind, c.count) for c in collectives(text, mesh(data=2, fsdp=4))}
    assert found == {("all-reduce", 5), ("all-reduce", 6), ("collective-permute", 15)}


def test_a_condition_of_unknown_trips_is_refused():
    others = f"""%sends (q: f32[256]) -> pred[] {{
  %q = f32[256]{{0}} parameter(0)
  %s = f32[256]{{0}} all-reduce(%q), {FSDP}, to_apply=%add
  ROOT %yes = pred[] constant(true)
}}

%stays (r: f32[256]) -> f32[256] {{
  ROOT %r = f32[256]{{0}} parameter(0)
}}
"""
    loop = "%loop = f32[256]{0} while(%x), condition=%sends, body=%stays"
    with pytest.raises(ValueError, match="no known trip count and runs s;"):
        collectives(program(loop, others=others), mesh(data=2, fsdp=4))


def test_a_loop_without_collectives_may_have_unknown_trips():
    others = """%stays (r: f32[256]) -> f32[256] {
  ROOT %r = f32[256]{0} parameter(0)
}
"""
    loop = "%loop = f32[256]{0} while(%x), condition=%stays, body=%stays"
    assert collectives(program(loop, others=others), mesh(data=2, fsdp=4)) == ()


SENDS = f"""%sends (q: f32[256]) -> f32[256] {{
  %q = f32[256]{{0}} parameter(0)
  ROOT %s = f32[256]{{0}} all-reduce(%q), {FSDP}, to_apply=%add
}}

%sends.2 (q2: f32[256]) -> f32[256] {{
  %q2 = f32[256]{{0}} parameter(0)
  ROOT %s2 = f32[256]{{0}} collective-permute(%q2), {PAIRS}
}}
"""


@pytest.mark.parametrize(
    ("attributes", "conditional"),
    [
        ("fusion(%x), kind=kCustom, calls=%sends", False),
        ("call(%x), to_apply=%sends", False),
        ('custom-call(%x), custom_call_target="f", called_computations={%sends}', False),
        ("conditional(%x, %x), branch_computations={%sends}", True),
    ],
)
def test_computations_that_are_called_are_entered(attributes, conditional):
    found = only(program(f"%c = f32[256]{{0}} {attributes}", others=SENDS))
    assert (found.kind, found.count, found.conditional) == ("all-reduce", 1, conditional)


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%sends, %sends.2}",
        "true_computation=%sends, false_computation=%sends.2",
    ],
)
def test_both_branches_of_a_conditional_count_and_are_marked(branches):
    text = program(f"%c = f32[256]{{0}} conditional(%x, %x, %x), {branches}", others=SENDS)
    found = collectives(text, mesh(data=2, fsdp=4))
    assert [(c.kind, c.count) for c in found] == [("all-reduce", 1), ("collective-permute", 1)]
    assert all(c.conditional for c in found)


@pytest.mark.parametrize(
    "line",
    [
        "all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
        "all-gather(%x), replica_groups=[8,1]<=[8], dimensions={0}",
        "collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
        "collective-permute(%x), source_target_pairs={}",
    ],
)
def test_groups_of_one_device_move_nothing(line):
    assert collectives(program(f"%c = f32[256]{{0}} {line}"), mesh(data=2, fsdp=4)) == ()


@pytest.mark.parametrize(
    ("groups", "axis", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor", 2),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("[2,4]<=[8]", "fsdp x tensor", 4),
        ("{}", "data x fsdp x tensor", 8),
        ("{{0,7},{1,6},{2,5},{3,4}}", "groups of 2", 2),
        ("mesh['x'=8] {'x':(2)2}", "fsdp", 2),
    ],
)
def test_axes_are_those_of_the_mesh_that_is_given(groups, axis, size):
    text = program(f"%c = f32[256]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    found = only(text, mesh(data=2, fsdp=2, tensor=2))
    assert (found.axis, found.group_size) == (axis, size)
    assert found.axes == (() if axis.startswith("groups") else tuple(axis.split(" x ")))


def test_a_permute_across_axes_is_named_by_the_fewest_that_hold_it():
    on = mesh(data=2, fsdp=2, tensor=2)
    text = "%c = f32[256]{{0}} collective-permute(%x), source_target_pairs={}"
    assert only(program(text.format("{{0,1},{2,3}}")), on).axis == "tensor"
    assert only(program(text.format("{{0,1},{1,3}}")), on).axis == "fsdp x tensor"
    assert only(program(text.format("{{1,6}}")), on).axis == "data x fsdp x tensor"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("all-reduce(%x), to_apply=%add", "collective without replica_groups"),
        ("all-reduce(%x), replica_groups=?, to_apply=%add", r"in an unknown form: '\?"),
        ("all-reduce(%x), replica_groups={{0}}, channel_id=1", "do not fit a mesh of 8 devices"),
        ("all-reduce(%x), replica_groups=[1,16]<=[16]", "do not fit a mesh of 8 devices"),
        ("collective-permute(%x)", "permute without source_target_pairs"),
        ("collective-permute(%x), source_target_pairs={{0,9}}", "do not fit a mesh of 8"),
        ("send(%x, %x), channel_id=3", "'send' between devices is not counted"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_its_line(line, message):
    text = program(f"%c = f32[256]{{0}} {line}")
    number = next(n for n, found in enumerate(text.splitlines(), 1) if "%c =" in found)
    with pytest.raises(ValueError, match=rf"HLO line {number}: .*{message}"):
        collectives(text, mesh(data=2, fsdp=4))


def test_unknown_element_type_is_refused():
    text = program(f"%c = f6e3m2[256]{{0}} all-gather(%x), {FSDP}")
    with pytest.raises(ValueError, match="the size of 'f6e3m2'"):
        collectives(text, mesh(data=2, fsdp=4))


def test_operation_and_source_line_are_told():
    where = 'metadata={op_name="jit(f)/psum" source_file="/src/a.py" source_line=3}'
    found = only(program(f"%c = f32[256]{{0}} all-reduce(%x), {FSDP}, to_apply=%add, {where}"))
    assert (found.op_name, found.source) == ("jit(f)/psum", "/src/a.py:3")


TWICE = program(
    f"%a = f32[256]{{0}} all-reduce(%x), {FSDP}, to_apply=%add,"
    f' metadata={{op_name="first" source_file="a.py" source_line=1}}',
    f"%b = f32[256]{{0}} all-reduce-start(%a), {FSDP}, to_apply=%add",
    "%w = f32[256]{0} negate(%x)",
    "%d = f32[256]{0} all-reduce-done(%b)",
    "%e = f32[512]{0} all-gather(%d), replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}",
)


def test_totals_add_what_is_of_one_kind_and_axis():
    reduced, gathered = totals(collectives(TWICE, mesh(data=2, fsdp=4)))
    assert (reduced.kind, reduced.axis, reduced.count) == ("all-reduce", "fsdp", 2)
    assert (reduced.bytes, reduced.ring_bytes, reduced.group_size) == (2 * KIB, 3 * KIB, 4)
    assert not reduced.overlapped  # one of the two is not
    assert (gathered.kind, gathered.axis, gathered.bytes) == ("all-gather", "data", 2 * KIB)
    hidden = [c for c in collectives(TWICE, mesh(data=2, fsdp=4)) if c.overlapped]
    assert totals(hidden)[0].overlapped


def test_assertion_passes_within_its_tolerance():
    expected = {("all-reduce", "fsdp"): 2.03 * KIB, ("all-gather", "data"): 2 * KIB}
    assert_collectives(TWICE, expected, mesh=mesh(data=2, fsdp=4))
    with pytest.raises(AssertionError, match="all-reduce along fsdp: 2,048 bytes, expected 2,079"):
        assert_collectives(TWICE, expected, mesh=mesh(data=2, fsdp=4), within=0.01)


def test_assertion_names_what_is_missing_and_what_is_too_much():
    expected = {("all-to-all", "fsdp"): 100.0, ("all-gather", "data"): 2 * KIB}
    with pytest.raises(AssertionError) as failed:
        assert_collectives(TWICE, expected, mesh=mesh(data=2, fsdp=4))
    message = str(failed.value)
    assert "all-to-all along fsdp: 0 bytes, expected 100" in message
    assert "all-reduce along fsdp: 2,048 bytes, expected 0" in message
    assert "first (a.py:1)" in message
    assert "all-gather" not in message


def test_assertion_leaves_small_ones_alone():
    only_gather = {("all-gather", "data"): 2 * KIB}
    check = functools.partial(assert_collectives, TWICE, only_gather, mesh=mesh(data=2, fsdp=4))
    check(ignore_below=2 * KIB + 1)
    with pytest.raises(AssertionError):
        check(ignore_below=2 * KIB)
    wrong = {("all-gather", "data"): KIB, ("all-reduce", "fsdp"): 2 * KIB}
    with pytest.raises(AssertionError, match="all-gather along data: 2,048 bytes"):
        assert_collectives(TWICE, wrong, mesh=mesh(data=2, fsdp=4), ignore_below=4 * KIB)


# What JAX and XLA write today, compiled for eight host devices: rows of 4 bytes an item.

ROWS, COLUMNS = 16, 32
BOTH = ("data", "fsdp")


def compiled(local, in_spec: P, out_spec: P) -> str:
    """Text of a program of shards of a float32 array of 16 rows and 32 columns."""
    island = jax.shard_map(
        local, mesh=mesh(data=2, fsdp=4), in_specs=in_spec, out_specs=out_spec, check_vma=False
    )
    whole = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    return jax.jit(island).lower(whole).compile().as_text()


def ring(axis: str, size: int):
    return functools.partial(
        jax.lax.ppermute, axis_name=axis, perm=[(i, (i + 1) % size) for i in range(size)]
    )


def gather(axis):
    return functools.partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)


def scatter(axis):
    return functools.partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=1, tiled=True)


def swap(axis):
    return functools.partial(
        jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=1, tiled=True
    )


def psum(axis):
    return functools.partial(jax.lax.psum, axis_name=axis)


FULL = ROWS * COLUMNS * 4


@pytest.mark.parametrize(
    ("local", "in_spec", "out_spec", "kind", "axis", "payload"),
    [
        (psum("fsdp"), P("data", "fsdp"), P("data"), "all-reduce", "fsdp", FULL // 8),
        (psum("data"), P("data", "fsdp"), P(None, "fsdp"), "all-reduce", "data", FULL // 8),
        (psum(BOTH), P("data", "fsdp"), P(), "all-reduce", "data x fsdp", FULL // 8),
        (gather("fsdp"), P("data", "fsdp"), P("data"), "all-gather", "fsdp", FULL // 2),
        (gather(BOTH), P(None, BOTH), P(), "all-gather", "data x fsdp", FULL),
        (scatter("fsdp"), P("data"), P("data", "fsdp"), "reduce-scatter", "fsdp", FULL // 2),
        (scatter(BOTH), P(), P(None, BOTH), "reduce-scatter", "data x fsdp", FULL),
        (swap("fsdp"), P("data", "fsdp"), P("data", "fsdp"), "all-to-all", "fsdp", FULL // 8),
        (swap(BOTH), P(None, BOTH), P(None, BOTH), "all-to-all", "data x fsdp", FULL // 8),
        (
            ring("fsdp", 4),
            P("data", "fsdp"),
            P("data", "fsdp"),
            "collective-permute",
            "fsdp",
            FULL // 8,
        ),
        (
            ring("data", 2),
            P("data", "fsdp"),
            P("data", "fsdp"),
            "collective-permute",
            "data",
            FULL // 8,
        ),
    ],
)
def test_programs_for_cpu(local, in_spec, out_spec, kind, axis, payload):
    found = only(compiled(local, in_spec, out_spec))
    assert (found.kind, found.axis, found.count, found.bytes) == (kind, axis, 1, payload)
    assert found.overlapped is None
    assert found.op_name.startswith("jit(")
    assert_collectives(
        compiled(local, in_spec, out_spec), {(kind, axis): payload}, mesh=mesh(data=2, fsdp=4)
    )


def test_source_of_a_compiled_program_is_the_line_that_wrote_it():
    found = only(compiled(lambda x: jax.lax.psum(x, "fsdp"), P("data", "fsdp"), P("data")))
    file, _, line = found.source.rpartition(":")
    assert file == __file__
    with open(__file__, encoding="utf-8") as source:
        assert 'lambda x: jax.lax.psum(x, "fsdp")' in source.read().splitlines()[int(line) - 1]


def test_a_permute_that_is_no_ring_lies_along_its_axis():
    shift = functools.partial(jax.lax.ppermute, axis_name="fsdp", perm=[(0, 1), (1, 2)])
    found = only(compiled(shift, P("data", "fsdp"), P("data", "fsdp")))
    assert (found.axis, found.bytes, found.ring_bytes) == ("fsdp", FULL // 8, FULL / 8)


@pytest.mark.parametrize("times", [1, 2, 7])
def test_fori_loop_multiplies(times):
    def local(x):
        return jax.lax.fori_loop(0, times, lambda _, c: jnp.tanh(jax.lax.psum(c, "fsdp")), x)

    sums = totals(collectives(compiled(local, P("data"), P("data")), mesh(data=2, fsdp=4)))
    assert [(t.kind, t.axis, t.count, t.bytes) for t in sums] == [
        ("all-reduce", "fsdp", times, times * FULL // 2)
    ]


def test_nested_scans_multiply():
    def inner(c, _):
        return jnp.tanh(ring("fsdp", 4)(c)), None

    def outer(c, _):
        c, _ = jax.lax.scan(inner, c, None, length=3)
        return jnp.tanh(jax.lax.psum(c, BOTH)), None

    def local(x):
        return jax.lax.scan(outer, x, None, length=5)[0]

    text = compiled(local, P("data"), P("data"))
    expected = {
        ("collective-permute", "fsdp"): 15 * FULL // 2,
        ("all-reduce", "data x fsdp"): 5 * FULL // 2,
    }
    assert_collectives(text, expected, mesh=mesh(data=2, fsdp=4), within=0.0)


def test_loop_of_unknown_length_is_refused():
    def local(x):
        def grow(c):
            return jax.lax.psum(c, "fsdp")

        return jax.lax.while_loop(lambda c: c[0, 0] < 100, grow, x)

    with pytest.raises(ValueError, match="has no known trip count and runs"):
        collectives(compiled(local, P("data"), P("data")), mesh(data=2, fsdp=4))


def test_branches_are_marked():
    def local(x):
        return jax.lax.cond(x[0, 0] > 0, psum("fsdp"), ring("fsdp", 4), x)

    found = collectives(compiled(local, P("data"), P("data")), mesh(data=2, fsdp=4))
    assert {c.kind for c in found} == {"all-reduce", "collective-permute"}
    assert all(c.conditional and c.bytes == FULL // 2 for c in found)


def test_another_mesh_than_the_compiled_one_is_refused():
    text = compiled(psum("fsdp"), P("data", "fsdp"), P("data"))
    with pytest.raises(ValueError, match="do not fit a mesh of 4 devices"):
        collectives(text, mesh(fsdp=4))
