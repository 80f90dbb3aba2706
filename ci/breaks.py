"""Breaks the package on purpose, one break after another, and fails where no test notices.

`tests/breaks/<room>.toml` lists the breaks of a room: a text that the package has exactly once,
what replaces it, and a mark. A break is caught when a test with `@pytest.mark.catches("<mark>")`
fails in a copy of the tree that has it; an error, of collection or of a fixture, catches nothing.

    python ci/breaks.py --part 1/4 | --only MARK[,MARK] | --list
"""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import queue
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    from ci.forks import Forks
except ImportError:  # run as a script
    from forks import Forks

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"aot": "jax_plugins.xla_cuda12", "browser": "playwright"}
"""Modules that an entry's `needs` stands for."""
KINDS = (".py", ".js", ".css")
"""Files that can be broken."""
LONGEST_S = 300
"""A break that takes its tests longer has no verdict."""
PRELOADED = ("numpy", "jax", "flax.nnx", "optax", "orbax.checkpoint", "chex")
"""What every run of tests imports; of a break's processor time it would be the half."""
FORKED_FROM = 8
"""Where so many breaks are tried, their runs are forked from a process that has these."""
_LEFT_BEHIND = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info")

_COUNT = itertools.count(1)


class UnusableError(Exception):
    """A break that cannot be tried, in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
    """One text replaced by another, to be caught by the tests of one mark."""

    room: str
    mark: str
    why: str
    old: str
    new: str
    needs: str | None = None

    def holder(self, root: Path) -> Path:
        """The one file of the package that has the old text."""
        files = [one for one in (root / "colossax").rglob("*") if one.suffix in KINDS]
        counts = {file: file.read_text().count(self.old) for file in files}
        found = sum(counts.values())
        if found != 1:
            raise UnusableError(f"no longer applies: its old text is there {found} times")
        return next(file for file, count in counts.items() if count)

    def applied(self, root: Path) -> tuple[Path, str]:
        """The file and its broken text."""
        file = self.holder(root)
        text = file.read_text().replace(self.old, self.new)
        try:
            if file.suffix == ".py":
                compile(text, str(file), "exec")
        except SyntaxError as problem:
            raise UnusableError(f"does not compile: {problem}") from problem
        return file, text


def breaks_of(root: Path) -> list[Break]:
    """All entries, room by room."""
    return [
        Break(room=file.stem, **entry)
        for file in sorted((root / "tests" / "breaks").glob("*.toml"))
        for entry in tomllib.loads(file.read_text())["break"]
    ]


def carriers(root: Path) -> dict[str, list[str]]:
    """The test files that carry each mark, found by their text."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for mark in dict.fromkeys(re.findall(r'mark\.catches\("([^"]+)"\)', file.read_text())):
            found.setdefault(mark, []).append(str(file.relative_to(root)))
    return found


def environment(tree: Path) -> dict[str, str]:
    """Of tests in a tree, whose package their children have too, from whatever folder.

    Bytecode is kept and annotations are not enforced: most of a break's time would go there.
    """
    found = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    return {**found, "COLOSSAX_UNCHECKED": "1", "PYTHONPATH": str(tree)}


def pytest_in(
    tree: Path, env: dict[str, str], marks: Sequence[str], files: Sequence[str], *more: str
) -> tuple[int | None, str]:
    """Run the tests of these marks; (exit status or None if it took too long, output)."""
    try:
        done = subprocess.run(
            (sys.executable, "-m", "pytest", *_arguments(marks, files), *more),
            cwd=tree,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_S if len(marks) == 1 else None,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _arguments(marks: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    # That a test fails is enough: how two long lists differ, and the smallest input that shows
    # it, can take minutes to find.
    quick = ("-x", "-q", "--assert=plain", "--hypothesis-profile=first", "-p", "no:cacheprovider")
    return (*quick, "--catches", ",".join(marks), *files)


class Tree:
    """A copy of the tree, and what runs tests in it."""

    def __init__(self, path: Path, env: dict[str, str], *, forks: bool):
        self.path, self._env = path, env
        # Read when it is imported: what the tests' own settings would say too late.
        self._forks = Forks({"JAX_PLATFORMS": "cpu", **env}, PRELOADED) if forks else None

    def tested(self, mark: str, files: Sequence[str]) -> tuple[int | None, str]:
        """Run the tests of a mark; as `pytest_in`."""
        if self._forks is None:
            return pytest_in(self.path, self._env, [mark], files)
        return self._forks.pytest(self.path, _arguments([mark], files), LONGEST_S)

    def close(self) -> None:
        """End what runs tests."""
        if self._forks is not None:
            self._forks.close()


def verdict(status: int | None, output: str) -> str:
    """`caught`, or what came instead."""
    if status is None:
        return f"no verdict after {LONGEST_S} s"
    if status == 1 and re.search(r"\d+ failed", summary(output)):
        return "caught"
    if status == 0:
        return "not caught: its tests pass"
    if status == 5:
        return "nobody catches it: no test carries its mark"
    return f"not caught: pytest ended with {status} ({summary(output)})\n{tail(output)}"


def summary(output: str) -> str:
    """What pytest says last: `1 failed, 2 passed in 3.45s`."""
    return output.rstrip().rpartition("\n")[2]


def tail(output: str) -> str:
    """The last lines, set off."""
    return "\n".join("    " + line for line in output.rstrip().splitlines()[-25:])


def tried(tree: Tree, one: Break, files: Sequence[str]) -> str:
    """The verdict on one break; the tree is as before afterwards."""
    if not files:
        return "nobody catches it: no test carries its mark"
    try:
        file, broken = one.applied(tree.path)
    except UnusableError as problem:
        return str(problem)
    whole, stat = file.read_text(), file.stat()
    # By the second, and the size, Python knows whether bytecode is of a text.
    own_second = stat.st_mtime_ns + next(_COUNT) * 10**9
    file.write_text(broken)
    os.utime(file, ns=(stat.st_atime_ns, own_second))
    try:
        return verdict(*tree.tested(one.mark, files))
    finally:
        file.write_text(whole)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def all_tried(
    trees: Sequence[Tree], some: Sequence[Break], held: dict[str, list[str]]
) -> Iterator[tuple[Break, str, float]]:
    """Each break with its verdict and seconds, as many at a time as there are trees."""
    free: queue.Queue[Tree] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one_tried(one: Break) -> tuple[Break, str, float]:
        tree, start = free.get(), time.monotonic()
        try:
            return one, tried(tree, one, held.get(one.mark, [])), time.monotonic() - start
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(one_tried, some)


def whole_passes(tree: Path, env: dict[str, str], held: dict[str, list[str]], jobs: int) -> bool:
    """Whether the tests of these marks pass where nothing is broken."""
    if not held:
        return True
    start = time.monotonic()
    files = sorted({file for files in held.values() for file in files})
    several = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 and len(files) > 1 else ()
    status, output = pytest_in(tree, env, sorted(held), files, *several)
    print(f"{time.monotonic() - start:6.1f} s  unbroken: {summary(output)}")
    if status:
        print(tail(output))
    return status == 0


def chosen(args: argparse.Namespace, every: Sequence[Break]) -> list[Break]:
    """The breaks that the arguments pick and the environment can try; says what is left out."""
    only = None if args.only is None else args.only.split(",")
    some = [one for one in every if (only is None or one.mark in only)]
    some = [one for one in some if args.needs in (None, one.needs)]
    part, parts = map(int, args.part.split("/"))
    some = some[part - 1 :: parts]
    missing = {need for need, module in NEEDS.items() if not _installed(module)}
    for need in sorted(missing):
        marks = [one.mark for one in some if one.needs == need]
        if marks:
            print(f"left out, {need} is not installed: {', '.join(marks)}")
    return [one for one in some if one.needs not in missing]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def listed(every: Sequence[Break], held: dict[str, list[str]]) -> None:
    """One line per break."""
    for one in every:
        files = ", ".join(held.get(one.mark, ["NOBODY"]))
        print(f"{one.room:11} {one.mark}: {one.why} [{files}]")


def run(root: Path, some: Sequence[Break], held: dict[str, list[str]], jobs: int) -> int:
    """Try them; 1 if any is not caught."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        trees = [Path(folder, str(i)) for i in range(min(jobs, len(some)))]
        shutil.copytree(root, trees[0], ignore=_LEFT_BEHIND)
        wanted = {one.mark: held[one.mark] for one in some if one.mark in held}
        if not whole_passes(trees[0], environment(trees[0]), wanted, jobs):
            return 1
        for tree in trees[1:]:  # with the bytecode made so far
            shutil.copytree(trees[0], tree)
        failed, forks = 0, len(some) >= FORKED_FROM
        running = [Tree(tree, environment(tree), forks=forks) for tree in trees]
        for one, found, seconds in all_tried(running, some, held):
            failed += found != "caught"
            print(f"{seconds:6.1f} s  {one.room}: {one.mark}: {found}", flush=True)
        for tree in running:
            tree.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(some) - failed} of {len(some)} breaks caught in {time.monotonic() - start:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processors"
    )
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="break the package on purpose; tests must notice")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth, from the Ith")
    parser.add_argument("--only", metavar="MARK[,MARK]", help="these alone")
    parser.add_argument("--needs", choices=sorted(NEEDS), help="those that need this extra")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="name them and try none")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    every, held = breaks_of(args.root), carriers(args.root)
    if args.list:
        listed(every, held)
        return 0
    some = chosen(args, every)
    if not some:
        print("no break is left to try")
        return 0 if args.only is None else 1
    return run(args.root, some, held, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
