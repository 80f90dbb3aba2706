"""Random histories: whatever comes, each says what it would say alone, and no page is lost."""

import pytest

from tests.scheduling.world import play


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 40, 10)], ids=str)
def test_any_history(seeds):
    for seed in seeds:
        play(seed)
