"""Steps that are no longer whole: found, named and moved aside, never deleted.

A step appears by one rename when it is finished. One that has a step's name and no manifest was
damaged later, and stands in the way: readers pass over it, and the next save of that step fails.
"""

from pathlib import Path

from colossax.checkpoint.folder import ARRAYS_ITEM, MANIFEST, is_step

BROKEN = ".broken"
"""Ends the name of what was moved aside; a number follows where there is one already."""


def broken_steps(directory: Path) -> dict[int, str]:
    """Steps without a manifest, ascending, and what they lack."""
    if not directory.is_dir():
        return {}
    steps = sorted(int(entry.name) for entry in directory.iterdir() if is_step(entry.name))
    return {step: lack for step in steps if (lack := _lack(directory / str(step))) is not None}


def chosen(directory: Path, step: int) -> str:
    """Which step is used, for people, and which later ones are broken."""
    found = {one: lack for one, lack in broken_steps(directory).items() if one > step}
    broken = "".join(f"; step {one} is broken: {lack}" for one, lack in found.items())
    return f"step {step} of {directory}{broken}"


def move_aside(directory: Path, step: int) -> Path:
    """Rename a step's folder, so that its number is free; the new name.

    Raises:
        OSError: It cannot be renamed.
    """
    target, count = directory / f"{step}{BROKEN}", 1
    while target.exists():
        count += 1
        target = directory / f"{step}{BROKEN}-{count}"
    return (directory / str(step)).rename(target)


def _lack(folder: Path) -> str | None:
    if (folder / ARRAYS_ITEM / MANIFEST).is_file():
        return None
    if not folder.is_dir():
        return "it is no folder"
    if not (folder / ARRAYS_ITEM).is_dir():
        return f"'{ARRAYS_ITEM}' is missing in it"
    return f"'{ARRAYS_ITEM}/{MANIFEST}' is missing in it"
