"""Where a run's numbers go beside `metrics.jsonl`: programs by name, imported where asked for.

Nothing is sent anywhere unless a program's own environment variables say so: Weights & Biases
writes offline runs into the run's folder (`WANDB_MODE=online` sends them), trackio into its folder
on this machine (`TRACKIO_DIR`).
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from colossax.config import nearest
from colossax.errors import InputError
from colossax.files import write_whole
from colossax.run.events import EventFile

EVENTS_FOLDER = "tensorboard"
DEFAULT_TRACKERS = ("tensorboard",)

_PACKAGES = {"json": None, "tensorboard": None, "wandb": "wandb", "trackio": "trackio"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What trackers are told of a run.

    Attributes:
        folder: The run's.
        name: Of what is trained.
        config: How it was asked for, as JSON.
        from_step: Steps done when it begins; above `begun` it is resumed.
        begun: Steps that the run's first state had seen.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    from_step: int
    begun: int = 0


@runtime_checkable
class Tracker(Protocol):
    """Takes numbers of steps."""

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Numbers of a step by name; None where JSON has none."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse what cannot be opened; imports nothing.

    Raises:
        InputError: There is no such tracker, or its package is not installed.
    """
    if isinstance(names, str):
        raise InputError(f"trackers: found {names!r}; give a list of names, as [{names!r}]")
    for name in names:
        if name not in _PACKAGES:
            raise InputError(f"trackers: unknown '{name}'{nearest(name, _PACKAGES)}")
        package = _PACKAGES[name]
        if package is not None and importlib.util.find_spec(package) is None:
            raise InputError(
                f"trackers: {name} needs the package '{package}', which is not installed; pip"
                f" install {package}, or leave it out"
            )


def open_trackers(names: Sequence[str], about: About) -> dict[str, Tracker]:
    """Those of these names; `json` is `metrics.jsonl` alone, which every run writes.

    Raises:
        InputError: One cannot be opened, with what it says.
    """
    opened: dict[str, Tracker] = {}
    for name in names:
        if name == "json":
            continue
        try:
            opened[name] = _OPEN[name](about)
        except Exception as problem:  # noqa: BLE001 (any that another program raises)
            for one in opened.values():
                one.close()
            said = " ".join(str(problem).split())
            raise InputError(
                f"trackers: {name} does not begin ({said}); mend that, or leave it out"
            ) from problem
    return opened


class _Wandb:
    """Weights & Biases; offline unless `WANDB_MODE` says otherwise."""

    def __init__(self, about: About):
        wandb: Any = importlib.import_module("wandb")
        place = str(about.folder.resolve())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", about.name),
            name=about.folder.name,
            id=_wandb_id(about),
            resume="allow",
            dir=place,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(about.config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._run.log(_known(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(about: About) -> str:
    """Of the run, kept in its folder, so that it is the same wherever the folder goes."""
    file = about.folder / "wandb" / "colossax-run-id"
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    if about.from_step:  # begun when it was made of the folder's place
        identity = hashlib.sha256(str(about.folder.resolve()).encode()).hexdigest()[:12]
    else:
        identity = secrets.token_hex(6)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, identity)
    return identity


class _Trackio:
    """trackio's database on this machine; a Space where `TRACKIO_SPACE_ID` names one."""

    def __init__(self, about: About):
        # It says on standard output what belongs on standard error.
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio: Any = importlib.import_module("trackio")
            self._run = self._trackio.init(
                project=about.name,
                name=about.folder.name,
                config=dict(about.config),
                resume="allow" if about.from_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._run.log(_known(scalars), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()  # the run's own would be called again at exit


def _known(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scalars.items() if value is not None}


_OPEN: dict[str, Callable[[About], Tracker]] = {
    "tensorboard": lambda about: EventFile(about.folder / EVENTS_FOLDER, from_step=about.from_step),
    "wandb": _Wandb,
    "trackio": _Trackio,
}
