"""Known requests are dealt to engines: neighbours to one, about as many tokens to each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.inference.engine.driving import dealt
from colossax.scheduling import EngineRequest


def requests(lengths):
    return [EngineRequest(prompt=(1,) * length, max_tokens=1) for length in lengths]


@pytest.mark.catches("neighbours-by-count")
@pytest.mark.catches("last-engine-idle")
def test_to_each_as_many_tokens():
    assert dealt(requests([9, 9, 9, 9]), 2) == [0, 0, 1, 1]
    assert dealt(requests([29, 9, 9, 9]), 2) == [0, 1, 1, 1]
    assert dealt(requests([9] * 6), 3) == [0, 0, 1, 1, 2, 2]
    assert dealt(requests([9]), 4) == [2], "any of them"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6))
def test_neighbours_stay_together(lengths, count):
    places = dealt(requests(lengths), count)
    assert places == sorted(places) and 0 <= places[0] and places[-1] < count
    share, most = sum(one + 1 for one in lengths) / count, max(lengths) + 1
    for at in range(count):
        own = sum(one + 1 for one, place in zip(lengths, places, strict=True) if place == at)
        assert own <= share + most
