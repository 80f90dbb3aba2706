"""What there is: versions, devices, what nvidia-smi tells, extras of this package."""

import dataclasses
import operator
import os
import platform
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

import jax

import colossax
from colossax.versions import version_tuple

_NVIDIA_SMI_LIMIT_S = 10.0
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_CUDA_DRIVERS = ((580, "cuda13"), (525, "cuda12"))  # the oldest driver that runs each
_BOUNDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}

Requires = Callable[[str], list[str] | None]
Version = Callable[[str], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What JAX uses; `memory_bytes` is what it may allocate on each, None when not told."""

    platform: str
    kind: str
    count: int
    processes: int
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvidia:
    """What nvidia-smi tells; `links` counts pairs of GPUs by the kind it names (NV18, PHB)."""

    driver: str
    gpus: tuple[str, ...]
    links: dict[str, int]


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


def versions() -> dict[str, str]:
    """Versions of Python, this package and those it stands on."""
    base = {"python": platform.python_version(), "colossax": colossax.__version__}
    return base | {name: metadata.version(name) for name in _PACKAGES}


def describe(devices: list[jax.Device]) -> Devices:
    """The devices in words and numbers; memory is the least of this process's own."""
    stats = [d.memory_stats() or {} for d in devices if d.process_index == jax.process_index()]
    limits = [stat.get("bytes_limit") for stat in stats]
    kinds = Counter(device.device_kind for device in devices)
    return Devices(
        platform=devices[0].platform,
        kind=", ".join(kinds),
        count=len(devices),
        processes=jax.process_count(),
        memory_bytes=min(filter(None, limits), default=None),
    )


def ask_nvidia() -> Nvidia | None:
    """GPUs, driver and links as nvidia-smi tells; None when it does not answer."""
    table = _nvidia_smi("--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [line.partition(", ") for line in (table or "").splitlines() if ", " in line]
    if not rows:
        return None
    topology = _nvidia_smi("topo", "-m") or ""
    return Nvidia(driver=rows[0][0], gpus=tuple(name for _, _, name in rows), links=pairs(topology))


def _nvidia_smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def pairs(topology: str) -> dict[str, int]:
    """Pairs of GPUs by the kind of their link, from the matrix of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", topology)
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return dict(Counter(kind for i, row in enumerate(rows) for kind in row[i + 1 : len(rows)]))


def links(devices: Devices | None, nvidia: Nvidia | None) -> str:
    """What connects the devices, as far as known."""
    if devices is None:
        return "not known"
    if devices.processes > 1:
        return "not known between processes"
    if devices.count == 1:
        return "none, one device"
    if devices.platform == "cpu":
        return "none, devices of one process share the host's memory"
    if devices.platform == "gpu" and nvidia and nvidia.links:
        known = ", ".join(f"{_link_name(kind)}: {n} pairs" for kind, n in nvidia.links.items())
        return f"same node; {known}"
    return "same node; what connects them is not known"


def _link_name(kind: str) -> str:
    return f"NVLink ({kind})" if re.fullmatch(r"NV\d+", kind) else f"PCIe ({kind})"


def unused(nvidia: Nvidia) -> str:
    """Why JAX leaves the GPUs alone, as far as can be told, and what to do."""
    here = f"{len(nvidia.gpus)} x {nvidia.gpus[0]} with driver {nvidia.driver}"
    return f"JAX uses the CPU, but nvidia-smi shows {here}; {_remedy(nvidia)}"


def _remedy(nvidia: Nvidia) -> str:
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        return f"JAX_PLATFORMS is '{chosen}': unset it"
    major = version_tuple(nvidia.driver)[0]
    wanted = [extra for oldest, extra in _CUDA_DRIVERS if major >= oldest]
    if not wanted:
        return f"update the driver to {_CUDA_DRIVERS[-1][0]} or later"
    all_extras = extras()
    lacking = [all_extras[extra].install for extra in wanted if extra in all_extras]
    if lacking and None not in lacking:
        return f"run {lacking[0]}"
    return "to see why, run JAX_PLATFORMS=cuda colossax check"


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
