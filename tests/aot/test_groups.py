"""Groups of devices in every form the compiler writes, and the mesh axes they are."""

import itertools
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from colossax.aot.groups import (
    axes_of,
    groups_of_pairs,
    parse_groups,
    parse_pairs,
    smallest_axes,
)


def mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.catches("groups-transposed")
@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
        ("{{0}, {1}}", ((0,), (1,))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("[8]<=[8]", tuple((i,) for i in range(8))),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh[a=2,b=4] {a}", COLUMNS),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6, 5, 4), (3, 2, 1, 0))),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", ((7, 3), (6, 2), (5, 1), (4, 0))),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=8] {'x':(2)4}", ROWS),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=4,'y'=2] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=4,'y'=2] {'x':(2)2,'y'}", ROWS),
        ("mesh['my-axis'=2,'b'=4] {'my-axis'}", COLUMNS),
    ],
)
def test_forms_of_replica_groups(text, groups):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}, metadata={{a=b}}"
    assert parse_groups(attributes, 8) == groups


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<<0,1>>", "<<0,1>>"),
        ("[2,4]=>[8]", "[2,4]=>"),
        ("[2,4]<=(8)", "[2,4]<=("),
        ("mesh<a=2,b=4> {a}", "mesh<a"),
        ("mesh['a'=2,'b'=4] a", "mesh['a'=2"),
        ("mesh['a'=2,'b'=4], device_ids=(0..7) {'a'}", "0..7"),
        ("{{0,1},[2,3]}", "{{0,1},[2,3]}"),
        ("{0,1}", "{0,1}"),
    ],
)
def test_unknown_forms_are_refused_with_the_text(text, shown):
    with pytest.raises(ValueError, match=f"in an unknown form: ['\"]{re.escape(shown)}"):
        parse_groups(f", replica_groups={text}, x=1", 8)


def test_unknown_axis_and_missing_groups_are_refused():
    with pytest.raises(ValueError, match="unknown axis: \"'z'\""):
        parse_groups(", replica_groups=mesh['a'=2,'b'=4] {'z'}", 8)
    with pytest.raises(ValueError, match="collective without replica_groups"):
        parse_groups(", channel_id=1", 8)


@st.composite
def iotas(draw):
    """Sizes of a device grid, an order of its dims, how many groups."""
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(dims))))
    total = math.prod(dims)
    count = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return dims, order, count


@given(iotas())
def test_iota_groups_are_rows_of_a_transposed_grid(iota):
    dims, order, count = iota
    total = math.prod(dims)
    text = f"[{count},{total // count}]<=[{','.join(map(str, dims))}]"
    if order != sorted(order):
        text += f"T({','.join(map(str, order))})"
    # Device at each position of the transposed grid, by hand.
    strides = [math.prod(dims[at + 1 :]) for at in range(len(dims))]
    spots = itertools.product(*(range(dims[at]) for at in order))
    flat = [sum(i * strides[at] for i, at in zip(spot, order, strict=True)) for spot in spots]
    width = total // count
    expected = tuple(tuple(flat[n * width : (n + 1) * width]) for n in range(count))
    assert parse_groups(f", replica_groups={text}", total) == expected


SIZES = st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)
AXES = "abc"


@given(SIZES.filter(lambda sizes: math.prod(sizes) <= 8), st.data())
@settings(max_examples=50)
def test_named_axes_come_back_by_name(sizes, data):
    """Groups of a set of axes, written in two forms, are those axes again."""
    names = AXES[: len(sizes)]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    on = mesh(**dict(zip(names, sizes, strict=True)))
    inside = [name for name in names if name in chosen]
    grid = ",".join(f"'{n}'={size}" for n, size in zip(names, sizes, strict=True))
    listed = ",".join(f"'{name}'" for name in inside)
    by_mesh = parse_groups(f", replica_groups=mesh[{grid}] {{{listed}}}", on.devices.size)

    together: dict[tuple[int, ...], list[int]] = {}
    for device, spot in enumerate(itertools.product(*map(range, sizes))):
        key = tuple(i for i, name in zip(spot, names, strict=True) if name not in chosen)
        together.setdefault(key, []).append(device)
    assert by_mesh == tuple(map(tuple, together.values()))

    wide = tuple(n for n, size in zip(names, sizes, strict=True) if n in chosen and size > 1)
    assert axes_of(by_mesh, on) == wide


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("fsdp",)),
        (((4, 0), (5, 1), (6, 2), (7, 3)), ("data",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("fsdp", "tensor")),
        (((0, 1, 4, 5), (2, 3, 6, 7)), ("data", "tensor")),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        ((tuple(range(8)),), ("data", "fsdp", "tensor")),
        (((0, 3), (1, 2), (4, 7), (5, 6)), ()),
        (((0, 1), (2, 3), (4, 5, 6, 7)), ()),
        (((0, 1), (2,), (3,), (4, 5), (6,), (7,)), ()),
        (tuple((i,) for i in range(8)), ()),
        ((), ()),
    ],
)
def test_groups_of_a_mesh_of_three_axes(groups, axes):
    assert axes_of(groups, mesh(data=2, fsdp=2, tensor=2)) == axes


def test_axes_of_one_device_are_never_named():
    on = mesh(stage=1, data=2, fsdp=4, tensor=1)
    assert axes_of(ROWS, on) == ("fsdp",)
    assert axes_of((tuple(range(8)),), on) == ("data", "fsdp")
    assert smallest_axes(ROWS, on) == ("fsdp",)


def test_pairs():
    assert parse_pairs(", source_target_pairs={{0,1},{1,0}}, x={2}") == ((0, 1), (1, 0))
    assert parse_pairs(", source_target_pairs={}, x={2}") == ()
    with pytest.raises(ValueError, match="permute without source_target_pairs"):
        parse_pairs(", channel_id=1")
    with pytest.raises(ValueError, match="source_target_pairs in an unknown form"):
        parse_pairs(", source_target_pairs={{0,1,2}}")
    with pytest.raises(ValueError, match="in an unknown form"):
        parse_pairs(", source_target_pairs={0,1}")


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ([(0, 1), (1, 2), (2, 3), (3, 0)], ((0, 1, 2, 3),)),
        ([(0, 1), (2, 3), (1, 2)], ((0, 1, 2, 3),)),
        ([(0, 4), (4, 0), (1, 5)], ((0, 4), (1, 5))),
        ([(2, 2)], ((2,),)),
        ([], ()),
    ],
)
def test_devices_that_a_permute_connects(pairs, groups):
    assert groups_of_pairs(pairs) == groups


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=10))
def test_connected_devices_against_repeated_joining(pairs):
    label = list(range(8))
    for _ in range(8):
        for first, second in pairs:
            label[first] = label[second] = min(label[first], label[second])
    touched = {device for pair in pairs for device in pair}
    expected = {
        tuple(d for d in sorted(touched) if label[d] == group)
        for group in {label[d] for d in touched}
    }
    assert set(groups_of_pairs(pairs)) == expected


def test_a_permute_that_leaves_devices_out_lies_within_axes():
    on = mesh(data=2, fsdp=4)
    assert axes_of(((0, 1, 2), (4, 5, 6)), on) == ()
    assert smallest_axes(((0, 1, 2), (4, 5, 6)), on) == ("fsdp",)
    assert smallest_axes(((0, 4),), on) == ("data",)
    assert smallest_axes(((0, 5),), on) == ("data", "fsdp")
