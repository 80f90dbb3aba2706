"""The kept breaks are in order, and their runner tells what is not caught from what is."""

import re
import shutil
from pathlib import Path

import pytest

from ci import breaks

ROOT = Path(breaks.__file__).parents[1]
EVERY = breaks.breaks_of(ROOT)
LEAST = 80
PACKAGE = ROOT / "colossax"
FILES_OF_ROOMS = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
ROOMS = {path.with_suffix("").parts[0] for path in FILES_OF_ROOMS if path.name[0] != "_"}


def test_marks_and_breaks_name_one_another():
    marks = [one.mark for one in EVERY]
    assert len(marks) == len(set(marks))
    assert len(marks) >= LEAST
    assert set(breaks.carriers(ROOT)) == set(marks)


def test_every_room_has_some():
    assert {one.room for one in EVERY} == ROOMS


def test_every_break_applies_once_and_compiles():
    found = {one.mark: usable(one) for one in EVERY}
    assert found == dict.fromkeys(found, True)


def usable(one: breaks.Break) -> bool | str:
    """Whether it says what it breaks and can be applied; else why not."""
    try:
        file, broken = one.applied(ROOT)
    except breaks.UnusableError as problem:
        return str(problem)
    return (
        file.relative_to(ROOT / "colossax").with_suffix("").parts[0] == one.room
        and broken != file.read_text()
        and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.mark) is not None
        and 0 < len(one.why) <= 100
        and "\n" not in one.why
    )


# A package of one room with two promises, one of them tested. Marks are spelt out when it is
# written: here their text would be taken for marks of this file.
FILES = {
    "colossax/__init__.py": "",
    "colossax/room.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "pyproject.toml": "[tool.pytest.ini_options]\n"
    'pythonpath = ["."]\naddopts = ["--strict-markers", "-m", "not far"]\n'
    'markers = ["catches(name): see ci/breaks.py", "far: left out"]\n',
    "tests/conftest.py": 'pytest_plugins = ("tests.plugins.catches",)\n',
    "tests/test_room.py": """
import subprocess
import sys

import pytest

from colossax.room import double, half


@pytest.fixture
def doubled():
    if double(2) != 4:
        raise RuntimeError("no fixture")


@pytest.mark.far
@CATCHES("seen")
def test_double():
    assert double(2) == 4


@CATCHES("unseen")
@CATCHES("gone")
@CATCHES("torn")
def test_half():
    assert half(0) == 0


@CATCHES("fixture")
def test_fixture(doubled):
    pass


@CATCHES("child")
def test_child(tmp_path):
    code = "from colossax.room import double; assert double(2) == 4"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path).returncode == 0
""",
}


def entry(mark, old, new):
    return f"[[break]]\nmark = '{mark}'\nwhy = 'so'\nold = '''{old}'''\nnew = '''{new}'''\n"


@pytest.fixture
def small(tmp_path):
    """Makes the package with these breaks."""

    def make(*entries):
        for name, text in FILES.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("CATCHES", "pytest.mark.catches"))
        plugin = Path("tests", "plugins", "catches.py")
        (tmp_path / plugin).parent.mkdir()
        shutil.copy(ROOT / plugin, tmp_path / plugin)
        (tmp_path / "tests" / "breaks").mkdir()
        (tmp_path / "tests" / "breaks" / "room.toml").write_text("\n".join(entries))
        return tmp_path

    return make


def run(root, capsys, *more):
    code = breaks.main(["--root", str(root), "--jobs", "1", *more])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("mark", "old", "new", "found"),
    [
        ("unseen", "x / 2", "x / 3", "not caught: its tests pass"),
        ("gone", "x / 5", "x / 3", "no longer applies: its old text is there 0 times"),
        ("gone", "return", "pass", "no longer applies: its old text is there 2 times"),
        ("torn", "x / 2", "x /", "does not compile: "),
        ("other", "x / 2", "x / 3", "nobody catches it: no test carries its mark"),
        ("fixture", "2 * x", "3 * x", "not caught: pytest ended with 1 ("),
        ("fixture", "def half", "def third", "not caught: pytest ended with "),
    ],
)
def test_what_is_not_caught_fails_and_says_why(small, capsys, mark, old, new, found):
    code, out = run(small(entry(mark, old, new)), capsys)
    assert code == 1
    assert f"s  room: {mark}: {found}" in out
    assert "0 of 1 breaks caught" in out


def test_a_fault_is_seen_by_children_in_another_folder(small, capsys):
    code, out = run(small(entry("child", "2 * x", "3 * x")), capsys)
    assert code == 0 and "room: child: caught" in out, out


def test_what_is_caught_passes_and_the_tree_stays_whole(small, capsys):
    """Also by a test that is left out unless it is asked for."""
    root = small(entry("seen", "2 * x", "3 * x"), entry("unseen", "x / 2", "x - 2"))
    code, out = run(root, capsys)
    assert code == 0
    assert "unbroken: 2 passed, 2 deselected" in out
    assert out.count(": caught\n") == 2 and "2 of 2 breaks caught in" in out
    assert (root / "colossax/room.py").read_text() == FILES["colossax/room.py"]


def test_runs_that_are_forked_say_the_same(small, capsys, monkeypatch):
    """Of a process that has imported what they need; one that takes too long has no verdict."""
    monkeypatch.setattr(breaks, "FORKED_FROM", 1)
    monkeypatch.setattr(breaks, "PRELOADED", ())
    monkeypatch.setattr(breaks, "LONGEST_S", 10)
    hangs = "x / 2 if x else __import__('time').sleep(60)"
    some = {"seen": ("2 * x", "3 * x"), "unseen": ("x / 2", "x / 3"), "gone": ("x / 2", hangs)}
    root = small(*(entry(mark, old, new) for mark, (old, new) in some.items()))
    code, out = run(root, capsys)
    assert code == 1
    assert re.findall(r"s  room: (\w+): (.*)", out) == [
        ("seen", "caught"),
        ("unseen", "not caught: its tests pass"),
        ("gone", "no verdict after 10 s"),
    ]


def test_tests_that_fail_unbroken_prove_nothing(small, capsys):
    root = small(entry("seen", "2 * x", "3 * x"))
    (root / "colossax/room.py").write_text(FILES["colossax/room.py"].replace("2 *", "4 //"))
    code, out = run(root, capsys)
    assert code == 1
    assert "unbroken: 1 failed" in out and "breaks caught" not in out


def test_parts_and_what_an_extra_is_needed_for(small, capsys, monkeypatch):
    monkeypatch.setattr(breaks, "NEEDS", {"aot": "no.such.module"})
    needy = entry("needy", "x / 2", "x / 3") + "needs = 'aot'\n"
    root = small(needy, *(entry(f"m{i}", "x / 2", f"x / {i}") for i in range(3, 7)))
    every = breaks.breaks_of(root)
    picked = []
    monkeypatch.setattr(breaks, "run", lambda root, some, *rest: picked.append(some) or 0)
    for part in ("1/2", "2/2"):
        assert run(root, capsys, "--part", part)[0] == 0
    assert [[one.mark for one in some] for some in picked] == [["m4", "m6"], ["m3", "m5"]]
    assert sorted(one.mark for one in every) == ["m3", "m4", "m5", "m6", "needy"]
    code, out = run(root, capsys, "--needs", "aot")
    assert code == 0
    assert out == "left out, aot is not installed: needy\nno break is left to try\n"
