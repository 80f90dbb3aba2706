"""The questions that come with colossax: which function does a sentence describe?

500 of them, on first sentences of docstrings of Python 3.11's standard library (PSF License 2),
with functions of the same module to choose from where it has enough. `ci/docstrings.py` made them.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from colossax.evaluation.choosing import ChoiceItem
from colossax.evaluation.formats.own import choices

FILE = Path(__file__).with_name("docstrings.jsonl")


def docstrings(shots: int) -> Iterator[ChoiceItem]:
    """All of them but the first so many, which are examples."""
    for item in choices(FILE, shots):
        place = item.where.rpartition(", ")[2]
        yield dataclasses.replace(item, where=f"docstrings, {place}")
