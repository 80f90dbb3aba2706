"""Where the tests of kernels run them: interpreted on a CPU or, marked gpu, on the GPU there is."""

import pytest

from colossax.compat import races_found

GPU = pytest.param("mosaic", marks=pytest.mark.gpu)

everywhere = pytest.mark.parametrize("place", ["interpret", GPU])
"""`place` is the name of an implementation: the same test, the same truth."""


def no_races(place):
    """Whether the interpreter found none; a GPU does not say."""
    return place != "interpret" or not races_found()
