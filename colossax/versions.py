"""Which JAX is supported, told without importing it where that can be; and what extras lack."""

import dataclasses
import operator
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

LOWEST_JAX = (0, 10, 2)
_BOUNDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}

Requires = Callable[[str], list[str] | None]
Version = Callable[[str], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of this package, what it lacks here and the command that installs that."""

    installed: bool
    missing: tuple[str, ...]
    install: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """`jax[cuda12]>=0.10.2; extra == "cuda12"`, taken apart; `text` is what precedes `;`."""

    text: str
    name: str
    asks: tuple[str, ...]
    bounds: tuple[tuple[str, str], ...]
    extra: str | None


def version_of(package: str) -> str:
    """The version that is installed; empty where none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def version_tuple(text: str) -> tuple[int, ...]:
    """`"0.12.0.1rc1"` as (0, 12, 0, 1)."""
    return tuple(int(re.match(r"\d*", part).group() or 0) for part in text.split(".")[:4])  # type: ignore[union-attr]


def require_supported_jax() -> None:
    """Refuse a JAX older than the oldest one the tests run on.

    Raises:
        ImportError: JAX is older than `LOWEST_JAX`.
    """
    found = _jax_version()
    if version_tuple(found) < LOWEST_JAX:
        wanted = ".".join(map(str, LOWEST_JAX))
        raise ImportError(f"colossax needs jax >= {wanted}, found {found}; upgrade jax")


def _jax_version() -> str:
    """Of the JAX that is imported, else of the one that is installed."""
    if "jax" not in sys.modules:
        try:
            return metadata.version("jax")
        except metadata.PackageNotFoundError:
            pass  # on the path without having been installed
    import jax

    return jax.__version__


def parse(text: str) -> Requirement:
    """A requirement as a package's metadata writes it."""
    head, _, marker = text.partition(";")
    match = re.match(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?", head)
    extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
    return Requirement(
        text=head.strip(),
        name=match.group(1) if match else head.strip(),
        asks=tuple(re.findall(r"[\w.-]+", match.group(2) or "")) if match else (),
        bounds=tuple(re.findall(r"(>=|<=|<)\s*([\w.]+)", head)),
        extra=extra.group(1) if extra else None,
    )


def extras(
    requires: Requires = metadata.requires, version: Version = metadata.version
) -> dict[str, Extra]:
    """This package's extras by name; none when it is not installed."""
    groups: dict[str, list[Requirement]] = {}
    for requirement in _requirements("colossax", requires):
        if requirement.extra is not None:
            groups.setdefault(requirement.extra, []).append(requirement)
    return {name: _extra(group, requires, version) for name, group in groups.items()}


def _extra(group: list[Requirement], requires: Requires, version: Version) -> Extra:
    lacks = {r.text: [*_lacking(r, requires, version)] for r in group}
    wanted = [text for text, missing in lacks.items() if missing]
    return Extra(
        installed=not wanted,
        missing=tuple(name for missing in lacks.values() for name in missing),
        install=f"pip install {shlex.join(wanted)}" if wanted else None,
    )


def outdated(
    requires: Requires = metadata.requires, version: Version = metadata.version
) -> Iterator[str]:
    """A sentence for each package this one needs that is missing or of another version."""
    for requirement in _requirements("colossax", requires):
        if requirement.extra is None:
            for lacking in _lacking(requirement, requires, version):
                todo = f"run pip install {shlex.quote(requirement.text)}"
                yield f"{lacking} is missing or of a version colossax does not support; {todo}"


def _requirements(package: str, requires: Requires) -> Iterable[Requirement]:
    try:
        return [parse(text) for text in requires(package) or ()]
    except metadata.PackageNotFoundError:
        return ()


def _lacking(requirement: Requirement, requires: Requires, version: Version) -> Iterator[str]:
    """What is missing or of another version, in the extras it asks for too."""
    try:
        actual = version(requirement.name)
    except metadata.PackageNotFoundError:
        yield requirement.name
        return
    if not all(_BOUNDS[sign](_padded(actual), _padded(text)) for sign, text in requirement.bounds):
        yield f"{requirement.name} {actual}"
    for inner in _requirements(requirement.name, requires):
        if inner.extra in requirement.asks:
            yield from _lacking(inner, requires, version)


def _padded(text: str) -> tuple[int, ...]:
    """`0.11` and `0.11.0` compare as equal."""
    return (*version_tuple(text), 0, 0, 0, 0)[:4]
