"""Places of arrays, and how layouts differ."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import OffloadError
from colossax.offload.disk import RecordLayout
from colossax.offload.disk.file import aligned_buffer
from colossax.offload.disk.layout import BLOCK_BYTES

DTYPES = [
    *map(np.dtype, ("f4", "f8", "f2", "u4", "i1", "?", "c8", "u2")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)),
]
ARRAYS = st.dictionaries(
    st.text(max_size=8),
    st.tuples(st.lists(st.integers(0, 17), max_size=4).map(tuple), st.sampled_from(DTYPES)),
    max_size=6,
)


@given(ARRAYS)
def test_arrays_begin_on_blocks_and_share_nothing(arrays):
    layout = RecordLayout(arrays)
    payload = aligned_buffer(layout.payload_bytes)
    views = layout.views(payload)
    assert {name: (view.shape, view.dtype) for name, view in views.items()} == layout.arrays
    for number, view in enumerate(views.values()):
        assert not view.size or view.ctypes.data % BLOCK_BYTES == 0
        view.reshape(-1).view(np.uint8)[...] = number + 1
    counts = np.bincount(payload, minlength=len(views) + 1)
    assert [view.nbytes for view in views.values()] == list(counts[1:])
    assert layout.payload_bytes < sum(v.nbytes for v in views.values()) + BLOCK_BYTES * (
        len(views) + 1
    )
    assert layout.payload_bytes % BLOCK_BYTES == 0


@given(ARRAYS)
def test_a_layout_equals_itself_in_any_order(arrays):
    layout = RecordLayout(arrays)
    turned = RecordLayout(dict(reversed(layout.arrays.items())))
    assert turned.difference(layout.rows()) is None
    assert turned.in_order_of(layout.rows()).rows() == layout.rows()


B = ((), "f8")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"a": ((2,), "f4")}, r"array 'b' float64\[\] is in the file and was not asked for"),
        ({"a": ((3,), "f4"), "b": B}, r"'a' is float32\[2\] in the file, asked .* float32\[3\]"),
        ({"a": ((2,), "i4"), "b": B}, r"'a' is float32\[2\] in the file, asked .* int32\[2\]"),
        ({"a": ((2,), "f4"), "b": B, "c": ((1,), "f4")}, r"array 'c' float32\[1\] is not in"),
    ],
)
def test_the_first_difference_is_named(asked, message):
    stored = RecordLayout({"a": ((2,), np.dtype("f4")), "b": ((), np.dtype("f8"))})
    layout = RecordLayout(
        {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in asked.items()}
    )
    assert re.search(message, layout.difference(stored.rows()))


@pytest.mark.parametrize("dtype", ["O", ">f4", [("a", "f4")]])
def test_dtypes_that_are_no_plain_numbers_are_refused(dtype):
    with pytest.raises(OffloadError, match="array 'a' has dtype .* cannot hold; give it"):
        RecordLayout({"a": ((2,), np.dtype(dtype))})


def test_a_layout_of_arrays():
    layout = RecordLayout.of({"a": np.zeros((2, 3), ml_dtypes.bfloat16)})
    assert layout.rows() == [["a", [2, 3], "bfloat16"]]
