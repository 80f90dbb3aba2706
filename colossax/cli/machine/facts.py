"""What there is: versions, devices, what nvidia-smi tells, extras of this package."""

import dataclasses
import os
import platform
import re
import subprocess
from collections import Counter
from importlib import metadata

import jax

import colossax
from colossax.versions import extras, version_tuple

_NVIDIA_SMI_LIMIT_S = 10.0
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_CUDA_DRIVERS = ((580, "cuda13"), (525, "cuda12"))  # the oldest driver that runs each


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
