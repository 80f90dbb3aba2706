"""The compiler's dumps of memory, read from small texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.aot.assignment import (
    Assigned,
    LiveRange,
    Value,
    covered,
    find_peak,
    parse_assignment,
    parse_live_ranges,
)

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 1048576, color 5, parameter 0, shape |f32[512,512]| at ShapeIndex {}, \
maybe-live-out:
 value: <13 a.1 @5> (size=1048576,offset=0): f32[512,512]{1,0:S(5)}
 value: <21 copy-start.1.0{0} @5> (size=1048576,offset=0): f32[512,512]{1,0:S(5)}
allocation 1: size 1048576, maybe-live-out:
 value: <23 loop_multiply_fusion @0> (size=1048576,offset=0): f32[512,512]{1,0}
allocation 2: size 2048, parameter 3, shape |f32[512]| at ShapeIndex {}:
 value: <17 b.1 @0> (size=2048,offset=0): f32[512]{0}
allocation 3: size 4, thread-local:
 value: <2 add.1 @0> (size=4,offset=0): f32[]
allocation 4: size 256, constant:
 value: <9 constant_514_clone_1 @0> (size=256,offset=0): f32[64]{0}
allocation 5: size 16, output shape is |(f32[512,512], f32[512])|, maybe-live-out:
 value: <24 tuple{} @0> (size=16,offset=0): (f32[512,512]{1,0:S(5)}, f32[512]{0})
allocation 7: size 5243160, preallocated-temp:
 value: <16 all-gather-start.10{1, 4} @0> (size=4,offset=0): u32[]
 value: <18 while.146{10} (phi) @0> (size=4194304,offset=128): f32[4,512,512]{2,1,0}

"""

LIVE = """\
HloLiveRange (max 922):
  InstructionSequence:
    0:param.48
    1:fusion
  BufferLiveRange:
    loop_fusion{}:2-5
    while.146{10}:3-9
    all-gather-start.10{1, 4}:0-0
  Live ranges at 3 (peak):
    while.146{10}: 4194304 bytes (cumulative: 4194304 bytes)
"""


def _values(*spans: tuple[int, int]) -> list[Assigned]:
    return [
        Assigned(value=(f"v{i}", ()), bytes=size, offset=offset, shape="")
        for i, (offset, size) in enumerate(spans)
    ]


def _ranges(*spans: tuple[int, int]) -> dict[Value, LiveRange]:
    return {(f"v{i}", ()): LiveRange(start=a, end=b) for i, (a, b) in enumerate(spans)}


def test_each_kind_of_allocation_is_read():
    found = parse_assignment(ASSIGNMENT)
    assert [(a.number, a.bytes, a.kind, a.parameter, a.host) for a in found] == [
        (0, 1048576, "argument", 0, True),
        (1, 1048576, "output", None, False),
        (2, 2048, "argument", 3, False),
        (3, 4, "thread-local", None, False),
        (4, 256, "constant", None, False),
        (5, 16, "output", None, False),
        (7, 5243160, "temp", None, False),
    ]


def test_allocations_of_versions_that_number_pages_are_the_same():
    paged = ASSIGNMENT.replace("color 5, ", "color 5, page 0, ").replace("2048, ", "2048, page 0, ")
    assert ", page 0, parameter 3" in paged
    assert parse_assignment(paged) == parse_assignment(ASSIGNMENT)


def test_values_keep_their_place():
    *_, temp = parse_assignment(ASSIGNMENT)
    first, second = temp.values
    assert first.value == ("all-gather-start.10", (1, 4))
    assert second == Assigned(
        value=("while.146", (10,)), bytes=4194304, offset=128, shape="f32[4,512,512]{2,1,0}"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BufferAssignment:", "Buffers:", "line 1: no heading"),
        (", thread-local:", ", new-kind:", "line 9: an unknown kind of allocation, new-kind"),
        ("allocation 2: size 2048", "allocation 2: 2048", "line 7: 'allocation 2: 2048"),
        (" value: <17 b.1 @0>", " value: 17 b.1", "line 8: no value: ' value: 17 b.1"),
    ],
)
def test_an_assignment_that_cannot_be_read_is_refused(old, new, message):
    with pytest.raises(ValueError, match=message):
        parse_assignment(ASSIGNMENT.replace(old, new))


def test_live_ranges_are_read():
    assert parse_live_ranges(LIVE) == {
        ("loop_fusion", ()): LiveRange(start=2, end=5),
        ("while.146", (10,)): LiveRange(start=3, end=9),
        ("all-gather-start.10", (1, 4)): LiveRange(start=0, end=0),
    }


def test_live_ranges_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="line 6: '    loop_fusion: 2 to 5'"):
        parse_live_ranges(LIVE.replace("loop_fusion{}:2-5", "loop_fusion: 2 to 5"))
    with pytest.raises(ValueError, match="no part 'BufferLiveRange:'"):
        parse_live_ranges(LIVE.replace("BufferLiveRange", "Ranges"))


@pytest.mark.catches("storage-shared")
def test_storage_that_two_values_share_counts_once():
    values = _values((0, 100), (0, 100), (100, 50))
    peak = find_peak(values, _ranges((0, 5), (5, 9), (5, 6)))
    assert (peak.time, peak.bytes) == (5, 150)
    assert len(peak.live) == 3


def test_the_first_of_equal_peaks_is_found():
    peak = find_peak(_values((0, 10), (0, 10)), _ranges((1, 2), (4, 5)))
    assert (peak.time, peak.bytes) == (1, 10)


def test_a_value_without_a_live_range_is_named():
    with pytest.raises(ValueError, match=r"live ranges: none for v1\{\}"):
        find_peak(_values((0, 1), (1, 1)), _ranges((0, 1)))


_SPAN = st.tuples(st.integers(0, 30), st.integers(1, 12))
_LIFE = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda x: (x[0], x[0] + x[1]))


@pytest.mark.catches("peak-live-range")
@given(st.lists(st.tuples(_SPAN, _LIFE), min_size=1, max_size=12))
def test_the_peak_is_that_of_a_count_byte_by_byte(cases):
    spans, lives = zip(*cases, strict=True)
    used = [
        len({b for (o, n), (a, z) in cases if a <= time <= z for b in range(o, o + n)})
        for time in range(20)
    ]
    peak = find_peak(_values(*spans), _ranges(*lives))
    assert (peak.bytes, peak.time) == (max(used), used.index(max(used)))
    assert peak.bytes == covered((v.offset, v.bytes) for v in peak.live)
