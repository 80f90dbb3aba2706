"""Slots take turns: each is seen, and a turn that nobody raised is refused."""

import subprocess

import pytest

from ci import slots

DAY_S = 24 * 3600


def test_every_slot_is_seen_within_as_many_landings():
    seen = {slots.lanes(turn) for turn in range(100, 100 + slots.LANDINGS)}
    assert seen == set(slots.SLOTS)


def test_a_slot_keeps_to_its_minutes():
    for slot in slots.SLOTS:
        assert sum(int(lane.rpartition(":")[2]) for lane in slot) <= slots.SLOT_S, slot


def test_one_landing_of_as_many_starts_without_kept_programs_in_another_slot_each_time():
    rounds = slots.LANDINGS
    fresh = [turn for turn in range(rounds**2) if slots.is_fresh(turn)]
    assert [len([t for t in fresh if t // rounds == n]) for n in range(rounds)] == [1] * rounds
    assert {slots.lanes(turn) for turn in fresh} == set(slots.SLOTS)


@pytest.mark.parametrize(
    ("turn", "committed", "newest_s", "told"),
    [
        (7, [], 0, None),
        (8, [(DAY_S, 7)], 3 * DAY_S, None),  # raised, not committed yet
        (8, [(DAY_S, 8), (0, 7)], DAY_S + 60, None),
        (8, [(DAY_S, 8), (0, 7)], 2 * DAY_S, "still holds the 8 of an earlier landing; write 9"),
        (9, [(DAY_S, 9), (0, 7)], DAY_S, "goes from 7 to 9; write 8"),
        (7, [(DAY_S, 8), (0, 7)], DAY_S, "goes from 8 to 7; write 9"),
    ],
)
def test_a_turn_is_one_more_than_the_last(turn, committed, newest_s, told):
    if told is None:
        slots.check(turn, committed, newest_s)
    else:
        with pytest.raises(slots.Refusal, match=told):
            slots.check(turn, committed, newest_s)


def test_what_is_no_number_is_refused():
    with pytest.raises(slots.Refusal, match="ci/turn holds 'next'; write one whole number"):
        slots.number("next", "ci/turn")


def test_turns_are_read_from_history(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "ci").mkdir()
    for turn in (3, 4):
        (tmp_path / slots.FILE).write_text(f"{turn}\n")
        git("add", ".")
        git("commit", "-m", "turn")
    assert [turn for _, turn in slots.changes(tmp_path)] == [4, 3]
    assert slots.changes(tmp_path / "no such folder") == []


def test_the_table_says_how_long_ago_each_slot_ran():
    count = len(slots.SLOTS)
    told = list(slots.table(count + 1, [(3 * DAY_S, count + 1), (2 * DAY_S, count), (DAY_S, 5)]))
    assert told[1].startswith("-> slot 1") and told[1].endswith("now")
    assert told[0].endswith("1 landings ago, 1970-01-03")
    assert told[5].endswith(f"{count - 4} landings ago, 1970-01-02")
    assert told[2].endswith("not yet")
