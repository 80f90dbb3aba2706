"""Random histories: whatever comes, each says what it would say alone, and no page is lost."""

from collections import Counter

import pytest

from tests.cases import quick_first
from tests.scheduling.world import play

FOURS = [range(i, i + 4) for i in range(0, 48, 4)]


@pytest.mark.parametrize(
    "seeds", quick_first(FOURS, FOURS[:9]), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}"
)
@pytest.mark.catches("a-step-reads-what-it-writes")
@pytest.mark.catches("all-of-a-prompt-is-found")
@pytest.mark.catches("another-adapters-prefix")
@pytest.mark.catches("two-pages-of-one-key")
@pytest.mark.catches("a-table-is-written-under-a-step")
@pytest.mark.catches("begun-again-before-its-token-is-known")
@pytest.mark.catches("said-before-is-forgotten")
@pytest.mark.catches("decodes-beyond-their-budget")
@pytest.mark.catches("prompts-beyond-the-budget")
@pytest.mark.catches("one-token-too-many-on-its-way")
@pytest.mark.catches("a-grammar-does-not-wait")
@pytest.mark.catches("what-a-restart-has-said-is-not-counted")
@pytest.mark.catches("deadlines-pass")
@pytest.mark.catches("pages-are-lost")
@pytest.mark.catches("guesses-take-what-is-not-theirs")
@pytest.mark.catches("told-after-the-end")
@pytest.mark.catches("a-step-says-one-token")
@pytest.mark.catches("guesses-beyond-the-budget")
@pytest.mark.catches("a-place-is-written-before-it-is-read")
@pytest.mark.catches("the-newest-in-the-host-goes")
@pytest.mark.catches("what-comes-back-takes-no-page")
@pytest.mark.catches("a-page-and-a-place-of-one-key")
def test_each_says_what_it_says_alone(seeds):
    for seed in seeds:
        play(seed)


def test_histories_have_all_that_can_happen():
    happened = Counter()
    for seed in range(8):
        world = play(seed, steps=80)
        happened.update(world.ended.values())
        happened.update(kind for kind, *_ in world.plans)
        stats = world.scheduler.stats
        happened.update(preempted=stats.preemptions, reused=stats.reused, back=stats.back)
    reasons = {"stop", "length", "cancelled", "deadline"}
    assert set(+happened) == reasons | {"mixed", "decode", "preempted", "reused", "back"}


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(1000, 1500, 100))
def test_many_more(start):
    for seed in range(start, start + 100):
        play(seed)
