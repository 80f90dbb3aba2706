"""How many guesses a request gets, and what is counted of them."""

import pytest

from colossax.scheduling import EngineRequest
from colossax.scheduling.drafts import Drafts
from colossax.scheduling.running import Run


def run(**fields):
    return Run(0, EngineRequest(prompt=(1, 2), max_tokens=9, **fields), 4, 5)


@pytest.mark.catches("right-guesses-are-not-counted")
def test_who_is_seldom_guessed_right_gets_one_guess_and_who_always_is_all():
    drafts, seldom, always = Drafts(5, adapts=True), run(), run()
    assert drafts.tokens(seldom) == (-1, -2, -3, -4, -5, -6)
    for _ in range(30):
        drafts.took(seldom, seldom.drafts, 0)
        drafts.took(always, 5, 5)
    assert (seldom.drafts, always.drafts) == (1, 5)
    assert drafts.tokens(seldom) == (-1, -2)
    assert drafts.accepted == 150 and 180 <= drafts.drafted < 300
    for _ in range(30):  # what was last counts most
        drafts.took(seldom, seldom.drafts, seldom.drafts)
    assert seldom.drafts == 5


@pytest.mark.catches("trees-are-cut")
def test_trees_are_looked_at_whole():
    drafts, one = Drafts(5, adapts=False), run()
    for _ in range(30):
        drafts.took(one, 5, 0)
    assert one.drafts == 5


@pytest.mark.catches("a-grammar-is-guessed-for")
def test_nobody_guesses_for_a_request_that_knows_its_tokens_one_by_one():
    assert run(waits=True).drafts == 0
