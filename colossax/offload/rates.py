"""How fast this machine moves, updates and multiplies: measured once, kept for the planner."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from colossax.config.cache import measured_path, read_measured, write_measured
from colossax.errors import InputError
from colossax.pallas import current_target
from colossax.pallas.bench import Effort, measure_limits, time_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRate:
    """How fast one optimizer updates parameters whose states lie beside it.

    Attributes:
        name: For people.
        bytes_per_direction: Per parameter: what a device fetches, and brings back, to update it.
        cpu_parameters_per_s: On the CPU, from and to host memory.
        device_parameters_per_s: On the device, from and to its memory.
    """

    name: str
    bytes_per_direction: float
    cpu_parameters_per_s: float
    device_parameters_per_s: float

    def __post_init__(self):
        _check_positive(self, f"update '{self.name}'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinedTest:
    """Losses with and without pipelined transfers; see `plan.offload.pipelined`.

    Attributes:
        jaxlib: Version whose compiler was tested.
        losses: How many were compared.
        largest_difference: Relative, of any of them; 0 where all bits are the same, None where one
            is not finite.
        passed: Whether it is small enough.
    """

    jaxlib: str
    losses: int
    largest_difference: float | None
    passed: bool

    @property
    def shown(self) -> str:
        """For people."""
        if self.largest_difference is None:
            return f"of {self.losses} losses not all are finite"
        return f"{self.losses} losses differ by {self.largest_difference:.2g} of them at most"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine with one kind of device does.

    Attributes:
        device_kind: As JAX names it. On a CPU, `cpu`: then all copies are within host memory.
        platform: Of the device: `cpu`, `gpu`.
        jax: Version it was measured with.
        to_device_bytes_per_s: Pinned host memory to the device, nothing else moving.
        to_host_bytes_per_s: The device to pinned host memory, likewise.
        both_ways_bytes_per_s: Each way, while as many bytes move the other.
        matmul_flops_per_s: A large matmul alone: bfloat16, on a CPU float32.
        updates: At least one.
        pipelined: None where it was not tested.
    """

    device_kind: str
    platform: str
    jax: str
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    both_ways_bytes_per_s: float
    matmul_flops_per_s: float
    updates: tuple[UpdateRate, ...]
    pipelined: PipelinedTest | None = None

    def __post_init__(self):
        _check_positive(self, "rates")
        if not self.updates:
            raise InputError("rates.updates: found none; measure at least one update")

    def update(self, bytes_per_direction: int | float) -> UpdateRate:
        """The update that moves the nearest number of bytes."""
        return min(self.updates, key=lambda u: abs(u.bytes_per_direction - bytes_per_direction))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """An update to measure, of float32 gradients.

    Attributes:
        name: For people.
        bytes_per_direction: As in `UpdateRate`.
        start: From float32 parameters `[n]`, all that is kept for them, themselves included.
        step: From that and gradients `[n]`, the same a step later.
    """

    name: str
    bytes_per_direction: float
    start: Callable[[Array], Any]
    step: Callable[[Any, Array], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of device is measured with.

    Attributes:
        copy_bytes: Of one copy.
        cpu_parameters: Updated at once by the CPU: more than its caches hold.
        device_parameters: Updated at once by the device.
        matmul: Rows and columns of both matrices.
        matmul_dtype: Of both.
        effort: How long each is measured.
    """

    copy_bytes: int
    cpu_parameters: int
    device_parameters: int
    matmul: int
    matmul_dtype: Any
    effort: Effort = Effort(seconds=0.1, repeats=5)


GPU_SETTING = Setting(
    copy_bytes=2**28,
    cpu_parameters=2**25,
    device_parameters=2**27,
    matmul=8192,
    matmul_dtype=jnp.bfloat16,
)
CPU_SETTING = Setting(
    copy_bytes=2**26,
    cpu_parameters=2**23,
    device_parameters=2**23,
    matmul=1024,
    matmul_dtype=jnp.float32,
)


def measure_rates(updates: Sequence[Update], setting: Setting | None = None) -> Rates:
    """Measure this process's first device and the CPU beside it; each rate is a median.

    Nothing else should run: the CPU's rate is that of the cores that are free.

    Raises:
        InputError: JAX was told to leave the CPU alone, or the device cannot reach host memory.

    Cost: ten seconds or so; on the device, three copies of `setting.copy_bytes` and the states
    of `setting.device_parameters`.
    """
    device, cpu, platform = jax.local_devices()[0], cpu_device(), current_target().platform
    if setting is None:
        setting = CPU_SETTING if platform == "cpu" else GPU_SETTING
    limits = measure_limits(
        setting.effort,
        dtype=setting.matmul_dtype,
        size=setting.matmul,
        copy_bytes=setting.copy_bytes,
    )
    to_device, to_host, both = _copies(device, setting)
    return Rates(
        device_kind=device.device_kind,
        platform=platform,
        jax=jax.__version__,
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        both_ways_bytes_per_s=both,
        matmul_flops_per_s=limits.matmul_flops,
        updates=tuple(_update_rate(update, device, cpu, setting) for update in updates),
    )


def rates_path(device_kind: str) -> Path:
    """The file that holds the rates of a kind of device, in the user's cache folder."""
    return measured_path("rates", device_kind)


def save_rates(rates: Rates, path: Path | None = None) -> Path:
    """Write rates where `load_rates` finds them, or at `path`; whole or not at all.

    Raises:
        InputError: The folder cannot be written.
    """
    path = rates_path(rates.device_kind) if path is None else path
    write_measured(rates, path, "rates")
    return path


def load_rates(device_kind: str) -> Rates | None:
    """The rates last measured for a kind of device, None where none were.

    Raises:
        InputError: The file is damaged, or of a form that this version does not read.
    """
    return read_measured(Rates, rates_path(device_kind), "rates", "colossax bench offload")


def cpu_device() -> jax.Device:
    """The CPU, beside whatever devices JAX computes on.

    Raises:
        InputError: JAX was told to leave it alone.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as problem:
        raise InputError(
            f"JAX_PLATFORMS: '{os.environ.get('JAX_PLATFORMS', '')}' leaves out the CPU, which is"
            f" wanted; add ',cpu' or unset it"
        ) from problem


def _copies(device: jax.Device, setting: Setting) -> tuple[float, float, float]:
    """Bytes a second to the device, to the host, and each way at once."""
    there, here = (_memory(device, kind) for kind in ("device", "pinned_host"))
    zeros = jnp.zeros((setting.copy_bytes // 4,), jnp.float32)
    on_device, on_host = jax.device_put(zeros, there), jax.device_put(zeros, here)

    def both() -> tuple[Array, Array]:
        return jax.device_put(on_host, there), jax.device_put(on_device, here)

    copies = {
        "to device": lambda: jax.block_until_ready(jax.device_put(on_host, there)),
        "to host": lambda: jax.block_until_ready(jax.device_put(on_device, here)),
        "both": lambda: jax.block_until_ready(both()),
    }
    times = time_calls(copies, [()], setting.effort)
    to_device, to_host, each = (on_host.nbytes / median(times[name]) for name in copies)
    return to_device, to_host, each


def _memory(device: jax.Device, kind: str) -> SingleDeviceSharding:
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if kind not in kinds:
        raise InputError(
            f"device {device.device_kind}: has no {kind} memory, only {', '.join(kinds)}; measure"
            f" on a GPU or a CPU"
        )
    return SingleDeviceSharding(device, memory_kind=kind)


def _update_rate(
    update: Update, device: jax.Device, cpu: jax.Device, setting: Setting
) -> UpdateRate:
    on_cpu = _parameters_per_s(update, cpu, setting.cpu_parameters, setting.effort)
    on_device = on_cpu
    if device != cpu:
        on_device = _parameters_per_s(update, device, setting.device_parameters, setting.effort)
    return UpdateRate(
        name=update.name,
        bytes_per_direction=update.bytes_per_direction,
        cpu_parameters_per_s=on_cpu,
        device_parameters_per_s=on_device,
    )


def _parameters_per_s(update: Update, device: jax.Device, count: int, effort: Effort) -> float:
    with jax.default_device(device):
        grads = jax.random.normal(jax.random.key(0), (count,))
        kept = [jax.jit(update.start)(jnp.ones((count,)))]
    step = jax.jit(update.step, donate_argnums=0)

    def call() -> Any:
        # Donated, so that nothing is allocated; what is given away must not be kept.
        kept[0] = step(kept[0], grads)
        return kept[0]

    return count / median(time_calls({"update": call}, [()], effort)["update"])


def _check_positive(value: Any, where: str) -> None:
    for field in dataclasses.fields(value):
        measured = getattr(value, field.name)
        if isinstance(measured, int | float) and not 0 < measured < math.inf:
            raise InputError(
                f"{where}.{field.name}: found {measured}; give what was measured, a number above 0"
            )
