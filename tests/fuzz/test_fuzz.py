"""Damage and hostile input by seed: nothing is wrong without a word. The driver: bench/fuzz.py."""

import os
import time
from pathlib import Path

import pytest

from colossax.errors import InputError
from tests.fuzz import base as start
from tests.fuzz.cases import KINDS, kind_of, tried
from tests.fuzz.judge import Verdict, called, held, judged, lost

CASES = 100
TURN = int((Path(__file__).parents[2] / "ci/turn").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    before = os.environ.get("COLOSSAX_CACHE")
    yield start.make(tmp_path_factory.mktemp("fuzz") / "base")
    os.environ.pop("COLOSSAX_CACHE", None)
    if before is not None:
        os.environ["COLOSSAX_CACHE"] = before


def wrong_of(base, seed, cases):
    """What is wrong, case by case; `cases` are numbers, and kinds or None."""
    found = [(number, *tried(base, seed, number, kind)) for number, kind in cases]
    return [f"case {n} ({k}): {what}\n{v.why}" for n, k, what, v in found if v.name == "wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_cases_others_at_each_landing(base, part):
    numbers = range(CASES * TURN + part, CASES * (TURN + 1), 4)
    wrong = wrong_of(base, 1_000_000, [(number, None) for number in numbers])
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.catches("fuzz-cache")
def test_a_fault_is_found_within_a_few_cases_of_its_kind(base):
    """Of values and caches; a break of the latter shows that what is asserted here can fail."""
    cases = [(number, "run, read") for number in range(40)]
    cases += [(number, "cache, corpus") for number in range(25)]
    wrong = wrong_of(base, 0, cases)
    assert not wrong, "\n\n".join(wrong)


def raising(problem):
    """A function that raises."""

    def call():
        raise problem

    return call


def verdict(function, **options):
    def good(_done):
        return Verdict(name="unharmed")

    return judged(called(function, limit_s=0.2), good=good, **options).name


def test_verdicts():
    assert verdict(lambda: 0) == "unharmed"
    assert verdict(raising(InputError("a.txt: is empty; give another"))) == "refused"
    assert verdict(raising(InputError("a.txt: is empty")), names=("a.txt",)) == "refused"
    assert verdict(raising(InputError("is empty")), names=("a.txt",)) == "wrong"
    assert verdict(raising(InputError("two\nlines"))) == "wrong"
    assert verdict(raising(InputError(""))) == "wrong"
    assert verdict(raising(ValueError("no sentence"))) == "wrong"
    assert verdict(raising(SystemExit(2))) == "wrong"
    assert verdict(lambda: time.sleep(30)) == "wrong"


def test_what_is_deleted_or_changed_is_lost_and_what_is_moved_is_not(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    before = held(tmp_path)
    (tmp_path / "a").rename(tmp_path / "moved")
    assert lost(before, tmp_path) == 0
    (tmp_path / "b").write_text("other")
    (tmp_path / "c").unlink()
    assert lost(before, tmp_path) == 2


def test_a_case_is_a_function_of_its_seed_and_number():
    kinds = [kind_of(7, number) for number in range(1000)]
    assert kinds == [kind_of(7, number) for number in range(1000)]
    assert set(kinds) == set(KINDS)
    assert kinds != [kind_of(8, number) for number in range(1000)]
