"""The folder of a run: what it holds, who may write into it, what may not change in it."""

import contextlib
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any, Literal

from colossax.config import user_path
from colossax.documents import member, read_json
from colossax.errors import InputError
from colossax.files import write_whole

RUN_FILE = "run.json"
LOG_FILE = "run.log"
"""What a run has to say once standard error cannot be written any more."""

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Places inside a run's folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and per validation."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        """The plot of the losses."""
        return self.path / "loss.png"

    @property
    def experts_picture(self) -> Path:
        """How evenly a mixture's experts were used."""
        return self.path / "experts.png"

    @property
    def log(self) -> Path:
        """What the run had to say when nobody could be shown it; mostly there is none."""
        return self.path / LOG_FILE

    @property
    def file(self) -> Path:
        """What says which run it is."""
        return self.path / RUN_FILE

    @property
    def holds_run(self) -> bool:
        """Whether a run has been started here."""
        return self.file.is_file() or self._in_checkpoints() is not None

    def read(self) -> dict[str, Any]:
        """What `write` wrote: `config` and `identity`; without the file, what checkpoints say.

        Raises:
            InputError: The file is damaged, was changed by hand, or is of a later format.
        """
        saved = None if self.file.is_file() else self._in_checkpoints()
        return saved or self._read()

    def _read(self) -> dict[str, Any]:
        try:
            return self._checked("restore it from a copy, or start a new run elsewhere")
        except InputError:
            if self._in_checkpoints() is None:
                raise
        return self._checked(
            "delete it, and --resume goes on by what the last checkpoint says of the run"
        )

    def _checked(self, remedy: str) -> dict[str, Any]:
        data = read_json(self.file, remedy=remedy)
        if data.get("format") != _FORMAT:
            raise InputError(
                f"{self.file}: written by another version of colossax; resume with that"
            )
        try:
            for name in ("config", "identity"):
                member(data, name, dict)
            if unknown := data.keys() - {"format", "config", "identity", "crc32"}:
                raise ValueError(f"it holds '{min(unknown)[:40]}', which we do not write")
            if data.get("crc32", _checksum(data)) != _checksum(data):  # older files have none
                remedy += "; values are changed by options, as in --resume --steps 200"
                raise ValueError("its checksum does not match: damaged, or changed by hand")
        except ValueError as problem:
            raise InputError(f"{self.file}: cannot be read ({problem}); {remedy}") from problem
        return data

    def _in_checkpoints(self) -> dict[str, Any] | None:
        """What the last checkpoint that can be read says of its run."""
        if not self.checkpoints.is_dir():
            return None  # without JAX, which comes with the next line
        from colossax.checkpoint.folder import StepFolder, finished_steps

        for step in reversed(finished_steps(self.checkpoints)):
            with contextlib.suppress(InputError, ValueError, KeyError):
                run = StepFolder(self.checkpoints, step).documents()["run"]
                return {name: member(run, name, dict) for name in ("config", "identity")}
        return None

    def config(self) -> dict[str, Any]:
        """How the run was asked for, as its task wrote it, with the plan that ran."""
        return self.read()["config"]

    def make(self) -> None:
        """Create the folder; it holds no run yet.

        Raises:
            InputError: It cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def write(self, config: dict[str, Any], identity: dict[str, Any]) -> None:
        """Create the folder and say what run it holds; whole or not at all.

        Args:
            config: How it was asked for, as JSON.
            identity: What decides its losses step by step, as JSON.

        Raises:
            InputError: The folder cannot be written.
        """
        data = json.loads(json.dumps({"config": config, "identity": identity}))
        data |= {"format": _FORMAT, "crc32": _checksum(data)}
        try:
            write_whole(self.file, json.dumps(data, indent=1, sort_keys=True))
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _unwritable(self, problem: OSError) -> InputError:
        return InputError(
            f"--out {self.path}: cannot be written ({problem.strerror}); choose another folder"
        )


def _checksum(data: dict[str, Any]) -> int:
    """Of what a run's file says, however it is laid out."""
    said = {name: data[name] for name in ("config", "identity")}
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def find_run_folder(out: str | None, *, recipe: str, resume: bool | Literal["auto"]) -> RunFolder:
    """The folder a run may use; without `out`, the next number under `runs/`. Writes nothing.

    With `"auto"` it may hold a run or not.

    Raises:
        InputError: It holds a run and is not to be resumed, or the other way round.
    """
    if out is None:
        if resume:
            raise InputError("--resume: which run is not said; name its folder with --out DIR")
        return RunFolder(path=_next_numbered(Path("runs"), re.sub(r"[^\w.-]+", "-", recipe)))
    folder = RunFolder(path=user_path(out, "--out"))
    if folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"--out {out}: is a file; choose a folder")
    if resume == "auto":
        return folder
    if resume and not folder.holds_run:
        raise InputError(f"--resume: {out} holds no run; drop --resume to start one there")
    if folder.holds_run and not resume:
        raise InputError(
            f"--out {out}: already holds a run; continue it with --resume or choose another folder"
        )
    return folder


def _next_numbered(parent: Path, recipe: str) -> Path:
    """`recipe-001`, or the number after the highest there is."""
    pattern = re.compile(re.escape(recipe) + r"-(\d+)$")
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    taken = [int(match[1]) for name in names if (match := pattern.match(name))]
    return parent / f"{recipe}-{max(taken, default=0) + 1:03d}"


def check_identity(folder: RunFolder, asked: dict[str, Any]) -> None:
    """Refuse to resume as a different run.

    Raises:
        InputError: Naming the first field that differs, and both values.
    """
    if (difference := first_difference(folder.read()["identity"], asked)) is not None:
        field, there, here = difference
        raise InputError(
            f"--resume: {field} is {there} in {folder.path} and {here} here; resume with the"
            f" run's own value, or start a new run in another folder"
        )


def first_difference(stored: dict[str, Any], asked: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field in which two identities differ, with both values; None where none does."""
    # A run that was begun before there was a choice has what was then the only one.
    only = {"optimizer.state": "float32", "data.mixture": "1", "data.packing": "packed"}
    only |= dict.fromkeys(("data.masking", "data.spans", "optimizer.ema"), "none")
    stored = only | stored
    if isinstance(adapter := stored.get("adapter"), dict):
        stored["adapter"] = {"base": "own", "double": False, "dropout": 0.0} | adapter
    for field, here in asked.items():
        there = stored.get(field)
        if isinstance(here, list):  # a name and a fingerprint, which alone decides
            same = isinstance(there, list) and len(there) == 2 and there[1] == here[1]
            there, here = (None, None) if same else (_named(there), _named(here))
        elif isinstance(here, dict):
            field, there, here = _first_in(field, there if isinstance(there, dict) else {}, here)
        if there != here:
            return field, there, here
    return None


def _named(pair: Any) -> str:
    known = isinstance(pair, list) and len(pair) == 2
    return f"'{pair[0]}' ({str(pair[1])[:12]})" if known else "unknown"


def _first_in(field: str, there: dict[str, Any], here: dict[str, Any]) -> tuple[str, Any, Any]:
    for key in {**here, **there}:
        if there.get(key) != here.get(key):
            return f"{field}.{key}", there.get(key), here.get(key)
    return field, None, None
