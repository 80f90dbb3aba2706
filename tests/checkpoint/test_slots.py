"""Slots say which region of which record an array is."""

import numpy as np
import pytest

from colossax.checkpoint import ArraySlot, slot_of
from colossax.checkpoint.slots import intersect, record_folder
from colossax.typing import ParamInfo

F32 = np.dtype("float32")


def info(**changes):
    fields = {"path": "layers/mlp/w", "dims": ("layers", "embed", "mlp"), "shape": (3, 4, 6)}
    return ParamInfo(**{**fields, "dtype": F32, "first_layer": 5, "total_layers": 8, **changes})


def test_slot_of_a_segment():
    slot = slot_of(info(), "model/params")
    assert slot.name == "model/params/layers/mlp/w"
    assert (slot.shape, slot.array_shape, slot.stacked) == ((8, 4, 6), (3, 4, 6), True)
    assert slot.box() == ((5, 8), (0, 4), (0, 6))
    assert slot.box((slice(1, 2), slice(None), slice(3, 6))) == ((6, 7), (0, 4), (3, 6))


@pytest.mark.catches("layer-of-segment")
def test_slot_of_one_unstacked_layer():
    slot = slot_of(info(dims=("embed", "mlp"), shape=(4, 6), first_layer=7), "model/params")
    assert (slot.shape, slot.array_shape, slot.stacked) == ((8, 4, 6), (4, 6), False)
    assert slot.box((slice(2, 4), slice(None))) == ((7, 8), (2, 4), (0, 6))


def test_slot_outside_a_stack():
    plain = info(
        path="norm/scale", dims=("embed",), shape=(4,), first_layer=None, total_layers=None
    )
    slot = slot_of(plain, "model/params")
    assert (slot.shape, slot.array_shape, slot.layered) == ((4,), (4,), False)
    assert slot.box() == ((0, 4),)


def test_slot_of_factored_optimizer_state():
    slot = slot_of(info(), "model/optimizer/v_row", shape=(3, 4), dtype=np.dtype("bfloat16"))
    assert (slot.shape, slot.array_shape) == ((8, 4), (3, 4))
    assert slot.dtype == np.dtype("bfloat16")


@pytest.mark.parametrize("first, layers", [(6, 3), (-1, 2), (8, None), (0, 0)])
def test_layers_outside_the_record_are_refused(first, layers):
    with pytest.raises(ValueError, match="not within a record of shape"):
        ArraySlot(name="m/p/w", shape=(8, 2), dtype=F32, first=first, layers=layers)


@pytest.mark.parametrize("name", ["w", "model/params", "model//w", "model/params/../w", "/m/p"])
def test_names_that_are_no_records_are_refused(name):
    with pytest.raises(ValueError, match="is not named <model>/<kind>/<path>"):
        ArraySlot(name=name, shape=(), dtype=F32)


def test_record_folder():
    assert record_folder("model/params/layers/q/w") == "model/params/layers.q.w"


def test_intersect():
    assert intersect(((0, 4), (2, 8)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 5),)) is None
