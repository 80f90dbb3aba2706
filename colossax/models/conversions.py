"""The conversion table of each family."""

import importlib
from collections.abc import Iterator, Mapping

from colossax.models.conversion import Conversion
from colossax.models.registry import FAMILIES


class _Conversions(Mapping[str, Conversion]):
    """By name of the family: what it brings, or `CONVERSION` of `convert.py` beside its sizes."""

    def __getitem__(self, name: str) -> Conversion:
        family = FAMILIES[name]
        if family.conversion is not None:
            return family.conversion
        package = family.config.__module__.rpartition(".")[0]
        return importlib.import_module(f"{package}.convert").CONVERSION

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


CONVERSIONS: Mapping[str, Conversion] = _Conversions()
