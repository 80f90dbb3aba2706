"""Which slot of the long checks this landing runs, and when each ran last.

    python3 ci/slots.py            the table, for people
    python3 ci/slots.py lanes      lanes and budgets of this landing's slot, one per line
    python3 ci/slots.py every      those of all slots
    python3 ci/slots.py cache      `kept` or `fresh`: whether programs compiled earlier may be used

Every landing runs the core; what does not fit beside it is cut into slots that take turns. The
file `ci/turn` holds the number of this landing; whoever submits raises it by one, and it is refused
where that was forgotten or done twice.
"""

import os
import subprocess
import sys
import time

SLOTS = (
    ("breaks:1/4:1440",),
    ("sweep:2/7:1440",),
    ("aot:3/6:1440",),
    ("breaks:2/4:1440",),
    ("sweep:3/7:1440",),
    ("aot:4/6:1440",),
    ("sweep:4/7:1440",),
    ("rest:3/3:1440",),
    ("breaks:3/4:1440",),
    ("parity:540", "warm:300"),
    ("aot:5/6:1440",),
    ("sweep:5/7:1440",),
    ("rest:1/3:1440",),
    ("sweep:6/7:1440",),
    ("aot:6/6:1440",),
    ("breaks:4/4:1440",),
    ("newest:900", "outside:540"),
    ("sweep:7/7:1440",),
    ("rest:2/3:1440",),
    ("sweep:1/7:1440",),
    ("aot:1/6:1440",),
    ("aot:2/6:1440",),
)
"""Lanes of `.ci/run` as `name:budget` or `name:part:budget`, budgets in seconds on two cores."""

LANDINGS = 22
"""All slots are seen within this many landings; one of as many does without kept programs."""

SLOT_S = 1440
FORGOTTEN_S = 12 * 3600
"""Where the newest commit is this much newer than the file's last change, that was not for it."""

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILE = "ci/turn"


class Refusal(Exception):
    """One sentence for the person who submits."""


def git(*arguments, root=ROOT):
    """What git prints; empty where there is no git, no history or no such thing."""
    command = ["git", "-C", root, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def number(text, where):
    """The turn that a version of the file holds."""
    if not text.strip().isdigit():
        raise Refusal(
            f"{where} holds {text.strip()!r}; write one whole number, the last one plus 1"
        )
    return int(text)


def changes(root=ROOT):
    """Commits that changed the file, newest first: seconds since 1970, and the turn set."""
    found = []
    for line in git("log", "--format=%H %ct", "--", FILE, root=root).splitlines():
        commit, seconds = line.split()
        text = git("show", f"{commit}:{FILE}", root=root)
        if text.isdigit():
            found.append((int(seconds), int(text)))
    return found


def check(turn, committed, newest_s):
    """Refuse a turn that is not one more than the one before, or that an earlier landing had.

    Args:
        turn: What the file holds now.
        committed: `changes`.
        newest_s: When the newest commit was made.
    """
    if not committed:
        return
    last_s, last = committed[0]
    earlier = [n for _, n in committed if n != turn]
    if turn == last and newest_s - last_s > FORGOTTEN_S:
        raise Refusal(f"{FILE} still holds the {turn} of an earlier landing; write {turn + 1}")
    if earlier and turn != earlier[0] + 1:
        raise Refusal(f"{FILE} goes from {earlier[0]} to {turn}; write {earlier[0] + 1}")


def lanes(turn):
    """Lanes of a turn's slot."""
    return SLOTS[turn % len(SLOTS)]


def is_fresh(turn):
    """Whether a landing ignores kept programs; over the rounds that meets every slot."""
    return (turn + turn // LANDINGS) % LANDINGS == 0


def table(turn, committed):
    """A line per slot: its lanes, and how long ago a landing ran it."""
    set_s = {n: seconds for seconds, n in committed}
    for place, slot in enumerate(SLOTS):
        ago = (turn - place) % len(SLOTS)
        if not ago:
            when = "now"
        elif turn - ago in set_s:
            day = time.strftime("%Y-%m-%d", time.gmtime(set_s[turn - ago]))
            when = f"{ago} landings ago, {day}"
        else:
            when = "not yet"
        yield f"{'  ' if ago else '->'} slot {place}  {' '.join(slot):28}  {when}"


def main(arguments):
    """Print what was asked for; 2 where the file is wrong."""
    try:
        with open(os.path.join(ROOT, FILE), encoding="utf-8") as file:
            turn = number(file.read(), FILE)
        committed = changes()
        check(turn, committed, int(git("log", "-1", "--format=%ct") or 0))
    except (Refusal, OSError) as problem:
        print(f"ci/slots.py: {problem}", file=sys.stderr)
        return 2
    if arguments == ["lanes"]:
        print("\n".join(lanes(turn)))
    elif arguments == ["every"]:
        print("\n".join(lane for slot in SLOTS for lane in slot))
    elif arguments == ["cache"]:
        print("fresh" if is_fresh(turn) else "kept")
    elif not arguments:
        print(f"turn {turn}")
        print("\n".join(table(turn, committed)))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
