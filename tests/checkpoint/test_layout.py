"""Every element of a record lies in one file, and every file with one process that holds it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.checkpoint import layout
from colossax.checkpoint.layout import files_within, plan_record
from colossax.checkpoint.slots import box_slices
from tests.checkpoint.support import plain, stack


def even_pieces(slot, counts, processes, replicas=1, shuffle=0):
    """Pieces of an array cut evenly, dealt to processes; replicas go to the next processes."""
    sizes = [n // c for n, c in zip(slot.array_shape, counts, strict=True)]
    pieces = {}
    for number, corner in enumerate(itertools.product(*map(range, counts))):
        index = tuple(slice(i * n, (i + 1) * n) for i, n in zip(corner, sizes, strict=True))
        number = (number * (2 * shuffle + 1)) % math.prod(counts) if shuffle else number
        owner = number * processes // math.prod(counts)
        holders = frozenset((owner + r) % processes for r in range(replicas))
        pieces[slot.box(index)] = holders
    return pieces


def assert_written_once(plan, members):
    """Each element in one file of one process that holds all of it; files lie on one grid."""
    holders = {i: pieces for i, _, pieces in members}
    written = np.zeros(plan.shape, np.int32)
    for tile in plan.tiles:
        for part in tile.parts:
            assert tile.owner in holders[tile.array][part]
        inside = np.zeros(plan.shape, bool)
        for part in tile.parts:
            inside[box_slices(part)] = True
        for box in files_within(tile.box, plan.layout.file):
            written[box_slices(box)] += 1
            assert inside[box_slices(box)].all()
            for (start, stop), size, whole in zip(box, plan.layout.file, plan.shape, strict=True):
                assert start % size == 0 and stop in (start + size, whole)
    assert (written == 1).all()
    for block, file in zip(plan.layout.block, plan.layout.file, strict=True):
        assert file % block == 0


@st.composite
def dims(draw):
    """A dim's size and how often it is cut."""
    cuts = draw(st.sampled_from([1, 1, 2, 4, 8]))
    return cuts * draw(st.sampled_from([1, 2, 3])), cuts


@settings(max_examples=60)
@given(
    inner=st.lists(dims(), min_size=1, max_size=3),
    layers=st.lists(st.sampled_from([1, 2, 3]), max_size=3),
    processes=st.sampled_from([1, 2, 4]),
    replicas=st.sampled_from([1, 2]),
    shuffle=st.sampled_from([0, 1, 3]),
    second_cuts=st.booleans(),
    bytes_=st.sampled_from([(64, 256, 32), (1, 16, 8), (1 << 20, 1 << 20, 1 << 20)]),
)
def test_every_element_is_written_once(
    inner, layers, processes, replicas, shuffle, second_cuts, bytes_
):
    shape, cuts = zip(*inner, strict=True)
    members = []
    if not layers:
        slot = plain("m/p/w", shape)
        members.append((0, slot, even_pieces(slot, cuts, processes, replicas, shuffle)))
    for i, count in enumerate(layers):
        slot = stack("m/p/w", (sum(layers), *shape), sum(layers[:i]), count)
        here = (1,) * len(cuts) if second_cuts and i else cuts
        members.append((i, slot, even_pieces(slot, (1, *here), processes, replicas, shuffle)))
    names = ("MERGE_BYTES", "FILE_BYTES", "BLOCK_BYTES")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, bytes_, strict=True):
            patch.setattr(layout, name, value)
        plan = plan_record(members)
    assert_written_once(plan, members)
    if layers:
        assert plan.layout.file[0] == 1


def test_small_pieces_of_one_process_share_a_file():
    slot = stack("m/p/w", (4, 64, 64), 0, 4)
    plan = plan_record([(0, slot, even_pieces(slot, (1, 8, 1), processes=1))])
    assert plan.layout.file == (1, 64, 64)


def test_small_pieces_of_two_processes_do_not():
    slot = stack("m/p/w", (4, 64, 64), 0, 4)
    plan = plan_record([(0, slot, even_pieces(slot, (1, 8, 1), processes=2))])
    assert plan.layout.file == (1, 32, 64)
    assert {tile.owner for tile in plan.tiles} == {0, 1}


def test_a_stack_cut_over_its_layers_still_has_files_of_one_layer():
    slot = stack("m/p/w", (4, 64, 64), 0, 4)
    plan = plan_record([(0, slot, even_pieces(slot, (2, 1, 1), processes=2))])
    assert plan.layout.file == (1, 64, 64)
    assert sorted(tile.box[0] for tile in plan.tiles) == [(0, 2), (2, 4)]


def test_large_records_are_cut_into_files_readable_in_blocks():
    slot = plain("m/p/table", (128256, 8192))
    plan = plan_record([(0, slot, even_pieces(slot, (1, 1), processes=1))])
    file_bytes, block_bytes = (4 * math.prod(s) for s in (plan.layout.file, plan.layout.block))
    assert plan.layout.file[1] == 8192
    assert layout.FILE_BYTES / 2 <= file_bytes <= layout.FILE_BYTES
    assert layout.BLOCK_BYTES / 4 <= block_bytes <= layout.BLOCK_BYTES


def test_odd_sizes_are_cut_too():
    slot = plain("m/p/table", (50257, 768))
    plan = plan_record([(0, slot, even_pieces(slot, (1, 1), processes=1))])
    assert 4 * math.prod(plan.layout.file) <= layout.FILE_BYTES
    assert 4 * math.prod(plan.layout.block) <= layout.BLOCK_BYTES


def test_replicated_records_are_dealt_out_over_processes():
    owners = [
        plan_record([(0, slot, even_pieces(slot, (1, 1), processes=4, replicas=4))]).tiles[0].owner
        for slot in (plain(f"m/p/w{i}", (8, 8)) for i in range(40))
    ]
    assert all(owners.count(process) >= 3 for process in range(4))


def members_of(*slots):
    return [
        (i, slot, even_pieces(slot, (1,) * len(slot.array_shape), 1))
        for i, slot in enumerate(slots)
    ]


@pytest.mark.catches("layers-left-out")
@pytest.mark.parametrize(
    "slots, message",
    [
        ([stack("m/p/w", (8, 2), 0, 3), stack("m/p/w", (8, 2), 4, 4)], "do not make up"),
        ([stack("m/p/w", (8, 2), 0, 5), stack("m/p/w", (8, 2), 4, 4)], "do not make up"),
        ([stack("m/p/w", (8, 2), 0, 7)], "do not make up"),
        ([plain("m/p/w", (8, 2)), plain("m/p/w", (8, 2))], "given 2 times"),
        ([stack("m/p/w", (8, 2), 0, 4), stack("m/p/w", (8, 3), 4, 4)], "its arrays disagree"),
    ],
)
def test_incomplete_records_are_refused(slots, message):
    with pytest.raises(ValueError, match=f"m/p/w: .*{message}"):
        plan_record(members_of(*slots))
