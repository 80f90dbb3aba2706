"""All kinds of cases, and one of them by its number."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import caches, foreign, forged, runs, texts, words
from tests.fuzz.base import Base
from tests.fuzz.judge import Verdict

Case = Callable[[Base, random.Random, Path], tuple[str, Verdict]]

KINDS: dict[str, tuple[int, Case]] = {
    "run, resumed": (14, runs.of_resume),
    "run, generates": (12, runs.of_generate),
    "run, exported": (8, runs.of_export),
    "run, read": (14, runs.of_reader),
    "cache, corpus": (8, caches.of_corpus),
    "cache, resumed": (3, caches.of_resume),
    "import": (12, foreign.of_import),
    "forged manifest": (5, forged.of_manifest),
    "forged document": (5, forged.of_document),
    "forged metadata": (3, forged.of_metadata),
    "numbers": (8, words.of_options),
    "recipes": (6, words.of_recipes),
    "plans": (4, words.of_plans),
    "commands": (5, words.of_commands),
    "streams": (2, words.of_streams),
    "data sets": (8, texts.of_data),
}
"""Name, how often of all, and what makes and judges one."""


def kind_of(seed: int, number: int) -> str:
    """Which kind a case is of."""
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f"kind {seed} {number}").choices(list(KINDS), weights)[0]


def tried(base: Base, seed: int, number: int, kind: str | None = None) -> tuple[str, str, Verdict]:
    """One case: its kind, what was done, and the verdict."""
    kind = kind or kind_of(seed, number)
    place, home = base.folder / f"case-{seed}-{number}", os.getcwd()
    place.mkdir()
    try:
        what, verdict = KINDS[kind][1](base, random.Random(f"case {seed} {number}"), place)
    finally:
        os.chdir(home)
        base.use_own_cache()
        shutil.rmtree(place, ignore_errors=True)
    return kind, what, verdict
