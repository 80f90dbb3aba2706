"""Devices of islands in a mesh, against every way of placing them."""

import itertools

import numpy as np
import pytest

from colossax.errors import PlanError
from colossax.pipeline.islands import island_order

AXES = ("stage", "data", "fsdp", "tensor")


def crosses(grid):
    """Whether an axis but the first has devices of several islands, in any of its groups."""
    for axis in range(1, grid.ndim):
        rows = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
        if any(len(set(row)) > 1 for row in rows.tolist()):
            return True
    return False


def placings(labels):
    """Every way in which the devices' islands may lie along a line, each once."""
    if not labels:
        yield ()
        return
    for first in sorted(set(labels)):
        rest = list(labels)
        rest.remove(first)
        for others in placings(rest):
            yield (first, *others)


def meshes(count):
    """Every mesh of so many devices over four axes."""
    for sizes in itertools.product(range(1, count + 1), repeat=len(AXES)):
        if np.prod(sizes) == count:
            yield sizes


CASES = [(2, 2), (2, 4), (1, 3), (4, 4), (2, 6), (6, 2), (3, 3, 2), (2, 2, 2, 2), (1, 2, 4), (8,)]


@pytest.mark.catches("island-crossed")
@pytest.mark.catches("islands-refused")
@pytest.mark.parametrize("counts", CASES, ids=str)
def test_an_order_is_found_where_there_is_one(counts):
    labels = [name for name, count in zip("abcd", counts, strict=False) for _ in range(count)]
    every = list(placings(labels))
    found = 0
    for shape in meshes(len(labels)):
        exists = any(not crosses(np.array(one).reshape(shape)) for one in every)
        sizes = dict(zip(AXES, shape, strict=True))
        # In whichever order the devices are counted.
        for given in (labels, labels[::-1], labels[::2] + labels[1::2]):
            if not exists:
                with pytest.raises(PlanError):
                    island_order(sizes, given)
                continue
            order = island_order(sizes, given)
            assert sorted(order) == list(range(len(labels)))
            assert not crosses(np.array([given[at] for at in order]).reshape(shape))
            found += 1
    assert found


def test_stages_of_an_island_follow_one_another():
    order = island_order({"stage": 4, "fsdp": 2}, "abababab")
    assert order == (0, 2, 4, 6, 1, 3, 5, 7)


NAMES = {0: "h100:1x8@ib", 1: "a100_80:1x4@roce"}


def test_without_stages_islands_are_refused():
    with pytest.raises(PlanError) as refused:
        island_order({"stage": 1, "fsdp": 12}, [0] * 8 + [1] * 4, NAMES)
    assert str(refused.value) == (
        "plan.mesh fsdp=12: it crosses 2 islands (h100:1x8@ib: 8 devices, a100_80:1x4@roce: 4"
        " devices), which axis 'stage' alone may, and that has size 1; give stage=3, so that a"
        " stage has 4 devices, or more stages, or one of the islands"
    )


def test_a_stage_that_no_island_is_a_multiple_of_is_refused():
    with pytest.raises(PlanError) as refused:
        island_order({"stage": 2, "fsdp": 3, "tensor": 2}, [0] * 8 + [1] * 4, NAMES)
    assert str(refused.value) == (
        "plan.mesh: a stage has 6 devices (fsdp=3,tensor=2), and the 8 of island 'h100:1x8@ib' are"
        " no multiple of them, so that another axis than 'stage' would cross islands; give"
        " stage=3, so that a stage has 4 devices, or more stages"
    )
