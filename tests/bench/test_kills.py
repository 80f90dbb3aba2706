"""Killed at random moments, four kinds of runs end as if nothing had been; by turns, others."""

from pathlib import Path

import pytest

TURN = int((Path(__file__).parents[2] / "ci/turn").read_text())
KILLS = 2
"""Of each of the four kinds."""


@pytest.fixture
def kills(script):
    return script("kills")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plain", marks=pytest.mark.catches("killed-run-forks")),
        "8 devices",
        "disk tier",
        "two processes",
    ],
)
def test_killed_twice_at_other_moments_each_landing(kills, kind, tmp_path):
    lives = kills.Lives(tmp_path / "lives")
    met, problem = kills.a_round(lives, kind, f"landing {TURN}", kills=KILLS)
    assert problem is None
    assert met <= KILLS


def test_a_row_that_is_lost_or_forked_is_found(kills):
    rows = [(1, 5.0, None), (2, 4.0, None), (2, None, 4.5)]
    assert kills._difference(rows, list(rows)) is None
    assert "lost [(2, 4.0, None)]" in kills._difference(rows, [rows[0], rows[2]])
    assert "forked [(2, 4.1, None)]" in kills._difference(rows, [*rows, (2, 4.1, None)])
    assert "3 rows and 4" in kills._difference(rows, [*rows, rows[-1]])


def test_all_kinds_of_runs_are_there(kills):
    assert list(kills.KINDS) == ["plain", "8 devices", "disk tier", "two processes"]
