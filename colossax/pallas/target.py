"""Which hardware an operation is chosen for."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware that a traced program is meant for.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        compute_capability: Of an NVIDIA GPU, `(9, 0)` for a Hopper; None where not known.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None


# A JAX user context is part of every trace key, so that one jitted function traced for two
# targets does not reuse the first one's choice of kernels.
_TARGET = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def target(platform: str, *, compute_capability: tuple[int, int] | None = None) -> Iterator[Target]:
    """Choose implementations for this hardware, be it there or not.

    For compiling on a machine without the device, whose own default backend would say `cpu`.
    """
    chosen = Target(platform=platform, compute_capability=compute_capability)
    with _TARGET(chosen):
        yield chosen


def current_target() -> Target:
    """The target in force, else the default backend's first device."""
    if _TARGET.value is not None:
        return _TARGET.value
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None:
        return Target(platform=jax.default_backend())
    major, minor = str(capability).split(".")
    return Target(platform=jax.default_backend(), compute_capability=(int(major), int(minor)))
