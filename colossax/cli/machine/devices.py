"""`--devices N`: host devices made before JAX starts, or the first N of the accelerators."""

import os
import re
from typing import TYPE_CHECKING

from colossax.errors import InputError

if TYPE_CHECKING:
    import jax

THREADS_PER_DEVICE = 4
"""Threads of XLA's pool for each host device."""

_FORCED = re.compile(r"--xla_force_host_platform_device_count=\S+")


def request_host_devices(count: int | None) -> None:
    """Have JAX's CPU backend show `count` devices; without effect on accelerators.

    Must come before anything asks JAX for devices; those that there are then stay as they are.
    """
    import jax  # by now it is needed; options are refused before

    from colossax.compat import devices_are_fixed

    if count is None or devices_are_fixed():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _FORCED.search(flags):  # JAX refuses to be told twice
        os.environ["XLA_FLAGS"] = _FORCED.sub("", flags).strip()
    # A collective that waits for others holds a thread of XLA's pool, which by default has as many
    # as there are devices; two at once on one device can then keep a third from ever beginning.
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
    jax.config.update("jax_num_cpu_devices", count)


def choose_devices(count: int | None) -> "list[jax.Device]":
    """The first `count` devices of each process; all when None.

    Raises:
        InputError: A process has fewer.
    """
    import jax

    devices = jax.devices()
    if count is None:
        return devices
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    for process, local in by_process.items():
        if len(local) < count:
            where = f" in process {process}" if len(by_process) > 1 else ""
            made = ", or start a new process, which makes them"  # JAX had started in this one
            raise InputError(
                f"--devices {count}: there are {len(local)} {local[0].platform} devices{where};"
                f" ask for {len(local)} or fewer{made if local[0].platform == 'cpu' else ''}"
            )
    return [device for local in by_process.values() for device in local[:count]]
