"""Damage to a run's folder: the run goes on, says something, is exported, is read."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from colossax.checkpoint import RecordReader
from colossax.inference import open_checkpoint
from tests.fuzz import base as truth
from tests.fuzz.base import STEPS, Base, checkpoints
from tests.fuzz.damage import damaged
from tests.fuzz.judge import Outcome, Verdict, called, commanded, held, judged, lost, wrong

Case = tuple[str, Verdict]
_GONE = "the last step is gone"


def of_resume(base: Base, rng: random.Random, place: Path) -> Case:
    """Go on with it: the losses and the last checkpoint are those of the run left alone."""

    def good(done: Outcome) -> Verdict:
        if done.value != 0:
            return wrong(f"exit code {done.value}: {done.said[-500:]}")
        found = truth.rows(place / "run")
        if found[-2:] != base.losses[-2:]:
            return wrong(f"other losses: {done.said[-800:]}")
        if found != base.losses and "metrics.jsonl" not in done.said:
            return wrong(f"other rows in metrics.jsonl without a word: {done.said[-800:]}")
        if truth.seals(place / "run") != base.seals:
            return wrong("another last checkpoint")
        return _by_step(place, done.said, r"resumed from step (\d+)")

    def resumed() -> Outcome:
        return commanded(*truth.resuming(place / "run"))

    return _tried(base, rng, place, resumed, good, all_files=True)


def of_generate(base: Base, rng: random.Random, place: Path) -> Case:
    """Its model says what it said."""

    def good(done: Outcome) -> Verdict:
        step = _step_in(done.said, r"^step (\d+) of")
        if done.value != 0 or json.loads(done.out) != base.generated.get(step):
            return wrong(f"exit code {done.value}, step {step}: {done.out[-500:]}")
        return _by_step(place, done.said, r"^step (\d+) of")

    return _tried(base, rng, place, lambda: truth.said(place / "run"), good)


def of_export(base: Base, rng: random.Random, place: Path) -> Case:
    """It is exported as it was."""

    def good(done: Outcome) -> Verdict:
        step = _step_in(done.said, r"^step (\d+) of")
        if done.value != 0 or truth.export_digest(place / "hf") != base.exported.get(step):
            return wrong(f"exit code {done.value}, another export of step {step}")
        return _by_step(place, done.said, r"^step (\d+) of")

    def exported() -> Outcome:
        return commanded("export", str(place / "run"), str(place / "hf"))

    return _tried(base, rng, place, exported, good)


def of_reader(base: Base, rng: random.Random, place: Path) -> Case:
    """Every record and document is what was saved."""

    def read() -> tuple[int, str, str]:
        open_checkpoint(place / "run")
        reader = RecordReader(checkpoints(place / "run"))
        return reader.step, truth.digest(reader), reader.chosen

    def good(done: Outcome) -> Verdict:
        step, found, chosen = done.value
        if found != base.arrays.get(step):
            return wrong(f"other values of step {step}")
        return _by_step(place, chosen, r"^step (\d+) of")

    return _tried(base, rng, place, lambda: called(read), good)


def _tried(
    base: Base,
    rng: random.Random,
    place: Path,
    call: Callable[[], Outcome],
    good: Callable[[Outcome], Verdict],
    *,
    all_files: bool = False,
) -> Case:
    """Damage one file or two, call, judge; what was there must still be there."""
    base.use_own_cache()
    run = base.copy(place)
    what, names = _harmed(run, rng, all_files=all_files)
    if not (checkpoints(run) / str(STEPS)).exists():
        (place / _GONE).touch()
    kept = held(checkpoints(run)) if checkpoints(run).is_dir() else {}
    before = _shape(run)
    done = call()
    verdict = judged(done, names=names, good=good)
    if verdict.name != "wrong" and (count := lost(kept, run)):
        verdict = wrong(f"{count} files of checkpoints are gone or changed")
    if verdict.name == "refused" and (missing := before - _shape(run)):
        verdict = wrong(f"refused, and gone are {sorted(missing)[:5]}")
    return what, verdict


def _shape(run: Path) -> set[str]:
    return {p.name for p in run.iterdir()} if run.is_dir() else set()


def _harmed(run: Path, rng: random.Random, *, all_files: bool) -> tuple[str, tuple[str, ...]]:
    """Damage done, and words one of which a refusal has to hold."""
    said, names = [], [run.name]
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        files = sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink())
        if not files:
            break
        chosen = _choose(files, run, rng, all_files=all_files)
        said.append(f"{chosen.relative_to(run)}: {damaged(chosen, rng, files)}")
        names += [chosen.name, chosen.parent.name]
    return "; ".join(said), tuple(names)


_STEP = re.compile(r"checkpoints/(\d+)/")


def _choose(files: list[Path], run: Path, rng: random.Random, *, all_files: bool) -> Path:
    """A file, each kind of file as likely as another, and the last step likelier."""
    step = rng.choice((STEPS, STEPS, STEPS, truth.EARLIER))
    groups: dict[str, list[Path]] = {}
    for file in files:
        inside = str(file.relative_to(run))
        found = _STEP.search(f"{inside}/")
        if found and int(found[1]) != step or not (found or all_files):
            continue
        kind = "value" if "/c/" in inside or inside.endswith("/c") else file.name
        groups.setdefault(kind, []).append(file)
        if kind == "value":
            groups.setdefault("value again", []).append(file)
    return rng.choice(groups[rng.choice(sorted(groups))]) if groups else rng.choice(files)


def _step_in(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else -1


def _by_step(place: Path, said: str, pattern: str) -> Verdict:
    """Of a right result: the last step used, or an earlier one and the reason told.

    Where a step's whole folder is gone there is none to tell, but which step was used.
    """
    step = _step_in(said, pattern)
    told = "broken" in said or (place / _GONE).exists()
    if step == STEPS:
        return Verdict(name="rebuilt" if told else "unharmed")
    if not told:
        return wrong(f"step {step} was used without a word: {said[-500:]}")
    return Verdict(name="rebuilt", why=f"from step {step}")
