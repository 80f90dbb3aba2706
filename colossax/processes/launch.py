"""Where a process stands among those of its run: what was given, or what its launcher says."""

import dataclasses
from typing import Any

import jax

from colossax.compat import ClusterUnavailable, detect_cluster
from colossax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Where a process stands among those of its run.

    Attributes:
        coordinator: `host:port` at which process 0 can be reached.
        processes: How many there are.
        process_id: Which one this is, from 0.
        local_devices: Devices of this machine that belong to this process; None: all.
    """

    coordinator: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.processes < 1 or not 0 <= self.process_id < self.processes:
            raise InputError(
                f"--process-id: found {self.process_id} of --processes {self.processes};"
                f" ids run from 0 to the number of processes less 1"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise InputError(
                f"--coordinator: found '{self.coordinator}'; write HOST:PORT of process 0"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_launch(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    *,
    timeout_s: float,
) -> Launch | None:
    """What was given, the rest from the launcher's environment; None for a run of one process.

    Slurm, Open MPI and indexed Kubernetes jobs are recognised as `jax.distributed` does.

    Raises:
        InputError: Some options are given and others neither given nor found.
    """
    if processes == 1:
        return None
    given = {"coordinator": coordinator, "processes": processes, "process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    detected = _detected(timeout_s) if missing else None
    if detected is None and len(missing) == len(given):
        return None
    if detected is None and missing:
        raise InputError(
            f"--{missing[0]}: not given, and no launcher's environment tells it;"
            f" give --coordinator, --processes and --process-id together"
        )
    fields: tuple[Any, ...] = detected or (coordinator, processes, process_id, None)
    address, count, index, devices = fields
    count = count if processes is None else processes
    if count == 1:
        return None
    return Launch(
        coordinator=coordinator or address,
        processes=count,
        process_id=index if process_id is None else process_id,
        local_devices=None if devices is None else tuple(devices),
    )


def _detected(timeout_s: float) -> tuple | None:
    try:
        return detect_cluster(timeout_s)
    except ClusterUnavailable as problem:
        raise InputError(
            f"the launcher's environment is there but unusable ({problem}); give --coordinator,"
            f" --processes and --process-id, or --processes 1 to run alone"
        ) from problem


def start_jax(launch: Launch | None) -> None:
    """Join JAX's own coordination; every process of the run must be there already."""
    if launch is None:
        return
    # It would take over SIGTERM, which the loop answers by saving.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        launch.coordinator,
        launch.processes,
        launch.process_id,
        local_device_ids=None if launch.local_devices is None else list(launch.local_devices),
        cluster_detection_method="deactivate",
    )
