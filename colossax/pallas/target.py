"""Which hardware an operation is chosen for."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from colossax.compat import is_attached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware that a traced program is meant for.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        compute_capability: Of an NVIDIA GPU, `(9, 0)` for a Hopper; None where not known.
        device_kind: Of a device that is there, as JAX names it: its kernels are chosen once they
            have proved themselves on it. None for one that may not be; there they count as proved.
        multiprocessors: Of a GPU; None where not known.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    device_kind: str | None = None
    multiprocessors: int | None = None


# A JAX user context is part of every trace key, so that one jitted function traced for two
# targets does not reuse the first one's choice of kernels.
_TARGET = jax.make_user_context(default_value=None)
_DEVICE = jax.make_user_context(default_value=None)
_KNOWN = jax.make_user_context(default_value=())


@contextlib.contextmanager
def target(platform: str, *, compute_capability: tuple[int, int] | None = None) -> Iterator[Target]:
    """Choose implementations for this hardware, be it there or not.

    For compiling on a machine without the device, whose own default backend would say `cpu`.
    Kernels count as proved.
    """
    chosen = Target(platform=platform, compute_capability=compute_capability)
    with _TARGET(chosen):
        yield chosen


@contextlib.contextmanager
def capabilities(known: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """Take devices of these kinds that do not say it to be of these compute capabilities.

    For compiling for GPUs of several kinds that are not there: each program's are chosen for the
    devices of the plan in force. Kernels count as proved.

    Args:
        known: By `device_kind`.
    """
    with _KNOWN(tuple(sorted(known.items()))):
        yield


@contextlib.contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Choose implementations for this `jax.Device`, where `target` says nothing else."""
    with _DEVICE(target_of(device)):
        yield


def target_of(device: Any) -> Target:
    """What a `jax.Device` is, of a machine or of a topology that is not there."""
    platform = "gpu" if device.platform == "cuda" else device.platform
    capability = getattr(device, "compute_capability", None)
    kind = device.device_kind if is_attached(device) else None
    if capability is None:
        known = next((c for name, c in _KNOWN.value if name == device.device_kind), None)
        return Target(platform=platform, compute_capability=known, device_kind=kind)
    major, minor = map(int, str(capability).split("."))
    return Target(
        platform=platform,
        compute_capability=(major, minor),
        device_kind=kind,
        multiprocessors=getattr(device, "core_count", None),
    )


def current_target() -> Target:
    """The target in force, else what the devices of the plan in force are, else JAX's default."""
    if _TARGET.value is not None:
        return _TARGET.value
    if _DEVICE.value is not None:
        return _DEVICE.value
    config: Any = jax.config
    chosen = config.jax_default_device
    if isinstance(chosen, str):
        return target_of(jax.local_devices(backend=chosen)[0])
    return target_of(jax.devices()[0] if chosen is None else chosen)
