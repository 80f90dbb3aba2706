"""Which checkpoint's model each model of a run starts from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.checkpoint import RecordReader, find_checkpoint
from colossax.checkpoint.base import BASE, base_document, base_of
from colossax.errors import InputError
from colossax.nn.decoder.head import OF_VOCABULARY
from colossax.run.options import Init, Source
from colossax.step.saving.records import MODEL
from colossax.typing import ParamInfo

_PARAMS = "params"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """A model in a checkpoint.

    Attributes:
        path: As it was given.
        checkpoint: What is there.
        records: Names of its records.
        model: Name among them; `MODEL` where it is alone.
        base: Where the frozen parameters are, if the model is an adapter.
    """

    path: str
    checkpoint: RecordReader
    records: frozenset[str]
    model: str
    base: "Origin | None" = None

    def __str__(self) -> str:
        return self.path if self.model == MODEL else f"'{self.model}' of {self.path}"

    @property
    def prefix(self) -> str:
        """Of the records of its parameters."""
        return f"{self.model}/{_PARAMS}"

    def lacks(self, info: ParamInfo) -> bool:
        """Whether a parameter is a new part of a weight, which the checkpoint has none of."""
        return info.stood_at == "" and not self._holds(info)

    def holding(self, info: ParamInfo) -> "Origin":
        """Itself, or its base, where that has a parameter."""
        if self.base is None or self._holds(info) or self.base.lacks(info):
            return self
        return self.base

    def document(self, folder: Path) -> dict[str, Any]:
        """What checkpoints of an adapter, in a folder, say of it as their base."""
        origin = self.base or self
        return base_document(origin.checkpoint, origin.model, folder)

    def check_all_read(self, infos: Iterable[ParamInfo]) -> None:
        """Refuse an adapter of which a model leaves out a part, or all.

        Raises:
            InputError: Names a record.
        """
        if self.base is None:
            return
        read = {f"{self.prefix}/{info.own_path}" for info in infos}
        mine = {name for name in self.records if name.startswith(f"{self.prefix}/")}
        for name in sorted(mine - read):
            raise InputError(
                f"init: {self} is an adapter with '{name}', which the run's model has not; leave"
                " adapter.* as it was trained, or start from what colossax export --merge"
                " --as-checkpoint writes"
            )

    def check_but_head(self, infos: Iterable[ParamInfo]) -> None:
        """Refuse what a model leaves out, but for what made logits where it has a new head.

        Raises:
            InputError: Names a record.
        """
        read = {f"{self.prefix}/{self.stored(info).own_path}" for info in infos}
        for name in sorted(self.records - read):
            part = name.removeprefix(f"{self.prefix}/")
            if part != name and part.split("/")[0] not in OF_VOCABULARY:
                raise InputError(
                    f"init: {self} has '{name}', which the run's model has not; use the model's"
                    " configuration that is stored in it"
                )

    def stored(self, info: ParamInfo) -> ParamInfo:
        """The parameter with the path under which the checkpoint has it."""
        if not info.stood_at or self._holds(info):
            return info
        return dataclasses.replace(info, path=info.stood_at)

    def _holds(self, info: ParamInfo) -> bool:
        return f"{self.prefix}/{info.own_path}" in self.records


def origins_of(
    init: Init, names: Sequence[str], base: str | Path | None = None
) -> dict[str, Origin]:
    """Which checkpoint's model each model of a run starts from; none for what begins random.

    Args:
        init: See `RunConfig`.
        names: Of the run's models; empty for one without a name, which is `MODEL` in the result.
        base: See `RunOptions.base`.

    Raises:
        InputError: It does not fit the models of the run, or of the checkpoint.
        CheckpointError: There is no finished step, or it is damaged.
    """
    if isinstance(init, Mapping):
        _check_names(init, names)
        return _based({name: _origin(source, name, base) for name, source in init.items()}, base)
    if not names:
        return _based({MODEL: _origin(init, MODEL, base)}, base)
    path = init[0] if isinstance(init, tuple) else init
    held = _models_of(frozenset(find_checkpoint(path).records()))
    if isinstance(init, tuple) or not set(names) <= set(held):
        raise InputError(
            f"init: the run trains {_listed(names)}, and '{path}' holds {_listed(held)}; say by"
            f" name what starts from it, as in {{'{names[0]}': {init!r}}}"
        )
    return _based({name: _origin(path, name, base) for name in names}, base)


def _based(origins: dict[str, Origin], base: str | Path | None) -> dict[str, Origin]:
    """The same; a base that is named has to be one of some of them."""
    if base is not None and not any(origin.base for origin in origins.values()):
        path = next(iter(origins.values())).path
        raise InputError(
            f"base: '{path}', which init names, is of a whole model and no adapter; leave base out"
        )
    return origins


def _check_names(init: Mapping[str, Source], names: Sequence[str]) -> None:
    if not names:
        raise InputError(
            f"init: it names {', '.join(map(repr, init)) or 'no model'}, and the run trains one"
            " model without a name; give the checkpoint alone, as init='runs/mine'"
        )
    unknown = sorted(set(init) - set(names))
    if unknown or not init:
        raise InputError(
            f"init: it names {_listed(unknown) if unknown else 'no model'}, and the run trains"
            f" {_listed(names)}; name those that start from a checkpoint"
        )


def _origin(source: Source, name: str, where: str | Path | None) -> Origin:
    """The model that is named in the checkpoint; else that of this name, or the only one, or the
    one that is stored as if it were alone.

    Args:
        source: Which checkpoint, and which model.
        name: Of the run's model.
        where: An adapter's base is now; None: where it was.
    """
    path, asked = source if isinstance(source, tuple) else (source, None)
    checkpoint = find_checkpoint(path)
    records = frozenset(checkpoint.records())
    held = _models_of(records)
    wanted = asked or (held[0] if len(held) == 1 else name)
    if asked is None and wanted not in held and MODEL in held:
        wanted = MODEL
    if wanted not in held:
        raise InputError(
            f"init: '{path}' holds {_listed(held)} and not {_listed((wanted,))}; give one of its"
            f" models, as in ('{path}', '{held[0] if held else MODEL}')"
        )
    base = None
    if checkpoint.document(BASE, dict) is not None:
        there, model = base_of(checkpoint, where)
        names = frozenset(there.records())
        base = Origin(path=str(there.directory), checkpoint=there, records=names, model=model)
    return Origin(path=str(path), checkpoint=checkpoint, records=records, model=wanted, base=base)


def _models_of(records: Iterable[str]) -> tuple[str, ...]:
    parts = (record.split("/") for record in records)
    return tuple(sorted({model for model, kind, *_ in parts if kind == _PARAMS}))


def _listed(names: Sequence[str]) -> str:
    quoted = ["one model without a name" if name == MODEL else f"'{name}'" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted or ["none"])
