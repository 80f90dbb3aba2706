"""The attention block: penalties of distance."""

import numpy as np
import pytest

from colossax.nn.attention import alibi_slopes


@pytest.mark.catches("alibi-extra-heads")
def test_slopes_beyond_a_power_of_two_lie_between_the_others():
    """Those of 12 heads in the paper: the eight of 8 heads, then every other one of 16."""
    of_8 = 2.0 ** -np.arange(1, 9)
    np.testing.assert_allclose(alibi_slopes(8), of_8)
    np.testing.assert_allclose(alibi_slopes(12), [*of_8, *2.0 ** (0.5 - np.arange(1, 5))])
