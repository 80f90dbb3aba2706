"""What `colossax export --experts` and `--layers` ask for."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossax.config import nearest, user_path
from colossax.documents import parse_json, read_json
from colossax.errors import InputError

if TYPE_CHECKING:
    from colossax.models import ModelParams

FORMS: dict[str, tuple[str, ...]] = {
    "prune": ("by", "loads", "seed"),
    "upcycle": ("choices", "noise", "redrawn", "seed"),
    "merge": (),
}
"""What may be done with experts, and the options of each."""

RUN_FILE = "metrics.jsonl"
LOAD = "expert_load"

_WAYS = ("load", "random")
_WHOLE, _NUMBERS = ("seed", "choices"), ("noise", "redrawn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedExperts:
    """What is made of a model's experts.

    Attributes:
        form: One of `FORMS`.
        value: What stands behind its `=`.
        options: The others, by name.
    """

    form: str
    value: str
    options: Mapping[str, Any]

    def __call__(self, params: "ModelParams", checkpoint: Path) -> "ModelParams":
        """The model that is written.

        Args:
            params: Of the checkpoint.
            checkpoint: Where it was read.

        Raises:
            InputError: The model cannot be made so; see `colossax.models.altered`.
        """
        from colossax.checkpoint import find_checkpoint
        from colossax.models import merged, most_used, params_of_checkpoint, pruned, upcycled

        if self.form == "merge":
            other = find_checkpoint(user_path(self.value, "--experts merge"))
            return merged(params, params_of_checkpoint(other))
        count = _whole(self.form, self.value)
        if self.form == "upcycle":
            return upcycled(params, count, **self.options)
        seed = {name: self.options[name] for name in ("seed",) if name in self.options}
        by, file = self.options.get("by", "load"), self.options.get("loads")
        loads = None
        if by == "load" and params.config.decoder().mixture is not None:
            loads = read_loads(run_file(checkpoint) if file is None else user_path(file, "loads"))
        return pruned(params, most_used(params, count, loads=loads, **seed))


def asked_experts(text: str) -> AskedExperts:
    """What the words of `--experts` ask for: `prune=4,by=random`.

    Raises:
        InputError: They are no such words, or an option is given that is another's.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    form, _, value = pairs[0]
    if form not in FORMS or not value:
        raise InputError(
            f"--experts: found '{text}'; give prune=K, upcycle=E or merge=CHECKPOINT"
            if form in FORMS
            else f"--experts: unknown '{form}'{nearest(form, FORMS)}"
        )
    options: dict[str, Any] = {}
    for name, _, given in pairs[1:]:
        if name not in FORMS[form]:
            known = nearest(name, FORMS[form]) if FORMS[form] else "; it has no options"
            raise InputError(f"--experts {form}: unknown option '{name}'{known}")
        if name in options or not given:
            raise InputError(f"--experts {form}: give {name} once, as {name}=...")
        options[name] = _option(name, given)
    if options.get("by", "load") not in _WAYS:
        raise InputError(f"--experts: by {options['by']!r}{nearest(options['by'], _WAYS)}")
    if options.get("by") == "random" and "loads" in options:
        raise InputError("--experts: loads are given, and by=random asks for none; leave one out")
    if form == "prune" and "seed" in options and options.get("by") != "random":
        raise InputError("--experts: a seed is given, and only by=random draws; leave seed out")
    return AskedExperts(form=form, value=value, options=options)


def asked_layers(text: str) -> Callable[["ModelParams"], "ModelParams"]:
    """What `--layers 0,2,5` asks for: a model with these layers alone.

    Raises:
        InputError: They are no numbers.
    """
    numbers = [_whole("layers", part, "--layers") for part in text.split(",")]

    def altered(params: "ModelParams") -> "ModelParams":
        from colossax.models import with_layers

        return with_layers(params, numbers)

    return altered


def run_file(checkpoint: Path) -> Path:
    """Where the run that wrote a checkpoint says how much each expert was used.

    Raises:
        InputError: There is no such file.
    """
    for folder in (checkpoint, *list(checkpoint.absolute().parents)[:2]):
        if (folder / RUN_FILE).is_file():
            return folder / RUN_FILE
    raise InputError(
        f"--experts prune: {checkpoint} has no {RUN_FILE} beside it that says how much each expert"
        " was used; give loads=FILE, or by=random"
    )


def read_loads(file: Path) -> Any:
    """Loads of experts, `[layers, experts]`: the mean over what a file has of them.

    Args:
        file: Of a run, `metrics.jsonl`; or JSON, an array of arrays, or an object whose
            `expert_load` is one.

    Raises:
        InputError: It has none.
    """
    import numpy as np

    if file.suffix == ".jsonl":
        # A run writes an empty list for a layer without experts.
        found = [
            [layer for layer in record[LOAD] if layer]
            for record in _records(file)
            if isinstance(record.get(LOAD), list) and record[LOAD]
        ]
    else:
        value = read_json(file, (dict, list), remedy="give a file of arrays of numbers")
        found = [value[LOAD] if isinstance(value, dict) and LOAD in value else value]
    try:
        loads = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        loads = np.zeros(0)
    if loads.ndim != 3 or not np.isfinite(loads).all():
        raise InputError(
            f"{file}: holds no {LOAD} of layers and experts; give the metrics.jsonl of a run with"
            " experts, or JSON as [[0.1, 0.9], [0.4, 0.6]]"
        )
    return loads.mean(axis=0)


def _records(file: Path) -> list[dict[str, Any]]:
    """What lines of a file are JSON objects."""
    found = []
    try:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    found.append(parse_json(line, dict))
                except ValueError:
                    continue
    except OSError as problem:
        raise InputError(
            f"{file}: cannot be read ({problem.strerror}); give another file as loads=FILE"
        ) from problem
    return found


def _option(name: str, given: str) -> Any:
    if name in _WHOLE:
        return _whole(name, given)
    if name not in _NUMBERS:
        return given
    try:
        return float(given)
    except ValueError:
        raise InputError(f"--experts: {name} is a number, found '{given}'") from None


def _whole(name: str, given: str, option: str = "--experts") -> int:
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise InputError(f"{option}: {name} is a whole number, found '{given[:40]}'")
    return int(given)
