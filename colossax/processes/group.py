"""How the processes of a run find one another and stay in step outside the device program.

Before JAX starts, every process reports to process 0 over TCP at the coordinator's address. So a
missing one can be named; JAX's own rendezvous only times out, and ends the process from C++. The
connections stay open for what must be agreed on between steps (see `StopAgreement`).
"""

import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from colossax.errors import InputError
from colossax.processes.launch import Launch
from colossax.processes.wire import Wire

_HELLO_TIMEOUT_S = 5.0


_ANSWER_SLACK_S = 15.0


_RETRY_S = 0.1


_LEAST_TOLD = 1 << 12
"""Bytes of a message over the devices."""


class Group:
    """The processes of a run, joined through process 0; a run of one has no connections.

    Attributes:
        process_id: Which process this is.
        processes: How many there are.
        wires: To the others, by process id: process 0 has all of them, the others process 0.
    """

    def __init__(self, launch: Launch | None, wires: dict[int, Wire]):
        self.launch = launch
        self.process_id = 0 if launch is None else launch.process_id
        self.processes = 1 if launch is None else launch.processes
        self.wires = wires
        self._served = False

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone writes and prints."""
        return self.process_id == 0

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make()` gives on process 0, as JSON, on every process; the others wait.

        Raises:
            InputError: `make` raised one, with its message everywhere; or a process ended.
        """
        value, problem = _attempt(make) if self.first else (None, None)
        return self._exchange(value, problem)

    def from_first_in_a_run(self, make: Callable[[], Any]) -> Any:
        """As `from_first`, while a run has the connections: what is told goes over the devices.

        Raises:
            InputError: `make` raised one, with its message everywhere.

        Cost: two collectives, of a number and of the text.
        """
        value, problem = _attempt(make) if self.first else (None, None)
        if self.processes == 1:
            if problem is not None:
                raise problem
            return value
        from jax.experimental.multihost_utils import broadcast_one_to_all

        refused = None if problem is None else str(problem)
        told = json.dumps({"value": value, "refuse": refused}).encode() if self.first else b""
        size = int(broadcast_one_to_all(np.int32(len(told))))
        # Of few lengths, as each is a program.
        text = np.zeros(max(_LEAST_TOLD, 1 << (size - 1).bit_length()), np.uint8)
        text[: len(told)] = np.frombuffer(told, np.uint8)
        text = np.asarray(broadcast_one_to_all(text), np.uint8)
        found = json.loads(text[:size].tobytes())
        if found["refuse"] is not None:
            raise InputError(found["refuse"])
        return found["value"]

    def together(self, make: Callable[[], Any]) -> Any:
        """What `make()` gives here, once it has succeeded on every process.

        Raises:
            InputError: On every process, when `make` raised one on any.
        """
        value, problem = _attempt(make)
        self._exchange(None, problem)
        return value

    def _exchange(self, value: Any, problem: InputError | None) -> Any:
        """Process 0's value on all; or the refusal of the lowest process that has one."""
        if self.processes == 1:
            if problem is not None:
                raise problem
            return value
        if self._served:
            raise InputError(
                "group: it has served a run, at whose end its connections were closed; give the"
                " next run a group of its own, by colossax.processes.join(...) at another port"
            )
        message = None if problem is None else str(problem)
        if self.first:
            answer = self._collect(value, message)
        else:
            self.wires[0].send({"refuse": message})
            answer = self.wires[0].receive()
            if answer is None:
                raise InputError("process 0 ended before the run began; see its message")
        if answer["refuse"] is not None:
            raise InputError(answer["refuse"])
        return answer["value"]

    def _collect(self, value: Any, message: str | None) -> dict[str, Any]:
        refusals = [message] if message else []
        for process_id, wire in self.wires.items():
            report = wire.receive()
            if report is None:
                refusals.append(f"process {process_id} ended before the run began; see its message")
            elif report["refuse"]:
                refusals.append(report["refuse"])
        answer = {"refuse": refusals[0] if refusals else None, "value": value}
        for wire in self.wires.values():
            _send_quietly(wire, answer)
        return answer

    def close(self) -> None:
        """Close the connections; the group serves no other run."""
        self._served = True
        for wire in self.wires.values():
            wire.close()


def _attempt(make: Callable[[], Any]) -> tuple[Any, InputError | None]:
    try:
        return make(), None
    except InputError as problem:
        return None, problem


def join(launch: Launch | None, *, timeout_s: float) -> Group:
    """Wait until every process of the run has reported to process 0.

    Raises:
        InputError: Some have not within `timeout_s` (each is named), process 0 cannot be
            reached, or two processes disagree about the run.
    """
    if launch is None:
        return Group(None, {})
    if launch.process_id == 0:
        return Group(launch, _host(launch, timeout_s))
    return Group(launch, {0: _report(launch, timeout_s)})


def _host(launch: Launch, timeout_s: float) -> dict[int, Wire]:
    deadline = time.monotonic() + timeout_s
    wires: dict[int, Wire] = {}
    with _listen(launch.address[1]) as server:
        while len(wires) < launch.processes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                _refuse_all(wires.values(), _absent(launch, wires, timeout_s))
            else:
                _welcome(launch, wires, Wire(connection))
    for wire in wires.values():
        wire.send({"refuse": None})
    return wires


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as problem:
        raise InputError(
            f"--coordinator: process 0 cannot listen on port {port} ({problem.strerror});"
            f" choose a free port"
        ) from problem


def _welcome(launch: Launch, wires: dict[int, Wire], wire: Wire) -> None:
    """Take in one process; what is no process of a run is hung up on."""
    try:
        hello = wire.receive(_HELLO_TIMEOUT_S) or {}
    except TimeoutError:
        hello = {}
    process_id, processes = hello.get("process_id"), hello.get("processes")
    if not isinstance(process_id, int) or not isinstance(processes, int):
        return wire.close()
    if processes != launch.processes:
        problem = (
            f"process {process_id} was started for {processes} processes and process 0 for"
            f" {launch.processes}; give all the same --processes"
        )
        _refuse_all([*wires.values(), wire], problem)
    if process_id in wires or process_id == 0:
        problem = f"two processes call themselves {process_id}; give each its own --process-id"
        _refuse_all([*wires.values(), wire], problem)
    wires[process_id] = wire


def _absent(launch: Launch, wires: dict[int, Wire], timeout_s: float) -> str:
    absent = [i for i in range(1, launch.processes) if i not in wires]
    noun, them = ("process", "it") if len(absent) == 1 else ("processes", "them")
    return (
        f"{noun} {', '.join(map(str, absent))} of {launch.processes}"
        f" did not reach process 0 at {launch.coordinator}"
        f" within {timeout_s:g} s; start {them} with --process-id, or raise --timeout-s"
    )


def _refuse_all(wires: Iterable[Wire], problem: str) -> None:
    for wire in wires:
        _send_quietly(wire, {"refuse": problem})
        wire.close()
    raise InputError(problem)


def _send_quietly(wire: Wire, message: dict[str, Any]) -> None:
    """Send to a process that may be gone; its absence shows when it is next read from."""
    try:
        wire.send(message)
    except OSError:
        wire.close()


def _report(launch: Launch, timeout_s: float) -> Wire:
    deadline = time.monotonic() + timeout_s
    wire = Wire(_connect(launch, deadline, timeout_s))
    wire.send({"process_id": launch.process_id, "processes": launch.processes})
    try:
        # Process 0 may have begun to wait later than this one did.
        answer = wire.receive(timeout_s + _ANSWER_SLACK_S)
    except TimeoutError:
        answer = None
    if answer is not None and answer["refuse"] is None:
        return wire
    wire.close()
    if answer is not None:
        raise InputError(answer["refuse"])
    raise InputError(
        f"process 0 at {launch.coordinator} hung up on process {launch.process_id} before all"
        f" {launch.processes} had come; see its message"
    )


def _connect(launch: Launch, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            connection = socket.create_connection(launch.address, timeout=left)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
        except OSError as problem:
            if time.monotonic() + _RETRY_S >= deadline:
                raise InputError(
                    f"process 0 of {launch.processes} did not answer at {launch.coordinator} within"
                    f" {timeout_s:g} s ({problem}); start it with --process-id 0, or check the"
                    f" address"
                ) from problem
        time.sleep(_RETRY_S)
