"""Finding one another, refusing together, stopping together: several processes as threads."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from colossax.errors import InputError
from colossax.processes import Gate, Group, Launch, StopAgreement, StopSignals, find_launch, join

LAUNCHERS = (
    "SLURM_JOB_ID",
    "OMPI_MCA_orte_hnp_uri",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def launches(processes: int) -> list[Launch]:
    address = f"127.0.0.1:{free_port()}"
    return [
        Launch(coordinator=address, processes=processes, process_id=i) for i in range(processes)
    ]


def in_threads(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """What `work` returns or raises for each item, all at once."""
    results: list[Any] = [None] * len(items)

    def run(index: int, item: Any) -> None:
        try:
            results[index] = work(item)
        except InputError as problem:
            results[index] = str(problem)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a process waits for ever"
    return results


@pytest.fixture
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_run_of_one_needs_nothing(no_launcher):
    assert find_launch(None, None, None, timeout_s=1.0) is None
    group = join(None, timeout_s=1.0)
    assert (group.first, group.processes, group.from_first(lambda: 7)) == (True, 1, 7)


def test_half_an_address_is_refused(no_launcher):
    with pytest.raises(InputError, match="--process-id: not given"):
        find_launch("here:1234", 2, None, timeout_s=1.0)
    with pytest.raises(InputError, match="--process-id: found 2 of --processes 2"):
        find_launch("here:1234", 2, 2, timeout_s=1.0)
    with pytest.raises(InputError, match="--coordinator: found 'here'; write HOST:PORT"):
        find_launch("here", 2, 1, timeout_s=1.0)


@pytest.mark.parametrize(
    "environment, expected",
    [
        (
            {
                "SLURM_JOB_ID": "4099",
                "SLURM_STEP_NODELIST": "node[003-005]",
                "SLURM_NTASKS": "3",
                "SLURM_PROCID": "2",
                "SLURM_LOCALID": "0",
            },
            Launch(coordinator="node003:61443", processes=3, process_id=2, local_devices=(0,)),
        ),
        (
            {
                "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.7,10.1.0.7:3491",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            Launch(coordinator="10.0.0.7:61442", processes=2, process_id=1, local_devices=(1,)),
        ),
    ],
    ids=["slurm", "open-mpi"],
)
def test_launchers_are_recognised(no_launcher, environment, expected):
    for name, value in environment.items():
        no_launcher.setenv(name, value)
    assert find_launch(None, None, None, timeout_s=1.0) == expected
    assert find_launch(None, 1, None, timeout_s=1.0) is None, "--processes 1 runs alone"


def test_a_kubernetes_job_without_its_client_is_refused(no_launcher):
    no_launcher.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert find_launch(None, None, None, timeout_s=1.0) is None, "a pod is not yet a job"
    no_launcher.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(InputError, match="needs the package 'kubernetes'.*--processes 1"):
        find_launch(None, None, None, timeout_s=1.0)


def test_values_and_refusals_reach_everyone():
    def work(launch: Launch) -> Any:
        group = join(launch, timeout_s=10.0)
        value = group.from_first(lambda: {"folder": "runs/x"})

        def fail_on_two() -> None:
            if group.process_id == 2:
                raise InputError("process 2 reads another text")

        try:
            group.together(fail_on_two)
        except InputError as problem:
            return value, str(problem)
        finally:
            group.close()

    expected = ({"folder": "runs/x"}, "process 2 reads another text")
    assert in_threads(work, launches(3)) == [expected] * 3


@pytest.mark.catches("first-process-missing")
def test_the_missing_process_is_named_to_all_that_came():
    came = [launch for launch in launches(4) if launch.process_id in (0, 2)]
    start = time.monotonic()
    first, second = in_threads(lambda launch: join(launch, timeout_s=1.0), came)
    assert first == second
    assert first.startswith("processes 1, 3 of 4 did not reach process 0 at 127.0.0.1:")
    assert time.monotonic() - start < 5


def test_a_missing_first_process_is_named():
    (problem,) = in_threads(lambda launch: join(launch, timeout_s=0.5), launches(2)[1:])
    assert problem.startswith("process 0 of 2 did not answer at 127.0.0.1:")


def test_processes_that_disagree_are_told():
    mine = launches(2)
    other = Launch(coordinator=mine[0].coordinator, processes=3, process_id=1)
    first, second = in_threads(lambda launch: join(launch, timeout_s=5.0), [mine[0], other])
    assert first == second
    assert first.startswith("process 1 was started for 3 processes and process 0 for 2")


def test_a_taken_port_is_refused():
    with socket.create_server(("", 0)) as server:
        launch = Launch(
            coordinator=f"127.0.0.1:{server.getsockname()[1]}", processes=2, process_id=0
        )
        with pytest.raises(InputError, match="--coordinator: process 0 cannot listen on port"):
            join(launch, timeout_s=1.0)


class Lockstep:
    """Steps that, like collectives, end only when every process has started them."""

    def __init__(self, processes: int, ahead: int):
        self._started = [0] * processes
        self._ahead = ahead
        self._condition = threading.Condition()

    def start(self, process_id: int, index: int) -> None:
        """Start a step; wait for the one `ahead` steps earlier, as reading metrics late does."""
        with self._condition:
            self._started[process_id] = index + 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: min(self._started) >= index + 1 - self._ahead)


@contextlib.contextmanager
def agreeing(launch: Launch) -> Iterator[tuple[StopSignals, Gate]]:
    """Signals and gate of a process that agrees with the others on when to stop."""
    group = join(launch, timeout_s=10.0)
    signals, gate = StopSignals(), Gate()
    with StopAgreement(group, signals, gate):
        yield signals, gate
    signals.close()


@pytest.mark.catches("stop-at-the-slowest")
@pytest.mark.parametrize("told", [[0], [1], [2], [0, 1, 2]])
def test_all_stop_after_the_same_step_without_waiting_for_ever(told):
    total = 100_000
    lockstep = Lockstep(3, ahead=2)

    def work(launch: Launch) -> Any:
        done = 0
        with agreeing(launch) as (signals, gate):
            for index in range(total):
                if not gate.enter(index):
                    break
                if index == 50 + launch.process_id and launch.process_id in told:
                    signals._handle(15, None)
                lockstep.start(launch.process_id, index)
                done = index + 1
        return done, gate.reason

    results = in_threads(work, launches(3))
    assert len(set(results)) == 1, results
    assert results[0][1] == "SIGTERM"
    assert 50 < results[0][0] < total


@pytest.mark.parametrize("told", [0, 1, 2])
def test_told_in_the_last_step_all_do_the_same_of_what_follows(told):
    lockstep = Lockstep(3, ahead=2)

    def work(launch: Launch) -> Any:
        with agreeing(launch) as (signals, gate):
            for index in range(10):
                assert gate.enter(index)
                if index == 9 and launch.process_id == told:
                    signals._handle(15, None)
                lockstep.start(launch.process_id, index)
            time.sleep(0.01 * launch.process_id)
            through = [gate.enter(10), gate.enter(11)]
        return through

    first, second, third = in_threads(work, launches(3))
    assert first == second == third


def test_a_wish_after_some_have_finished_stops_nobody():
    """Process 0 leaves first; a later wish of process 1 must neither hang nor fail."""
    left = threading.Event()

    def work(launch: Launch) -> Any:
        with agreeing(launch) as (signals, gate):
            for index in range(10):
                assert gate.enter(index)
            if launch.process_id == 1:
                assert left.wait(10)
                signals._handle(15, None)
        left.set()
        return True

    assert in_threads(work, launches(2)) == [True, True]


@pytest.mark.catches("failure-of-the-first-untold")
@pytest.mark.parametrize("late", [0, 1])
def test_the_failure_of_the_first_process_is_that_of_all(late):
    """Also when it is known only as that process leaves, and where another has left before."""

    def work(launch: Launch) -> Any:
        group, gate = join(launch, timeout_s=10.0), Gate()
        with StopAgreement(group, StopSignals(), gate) as agreement:
            assert gate.enter(0)
            time.sleep(0.05 * (launch.process_id == late))
            agreement.failure = f"of {launch.process_id}"
        return agreement.failure_of_first

    assert in_threads(work, launches(3)) == [None, "of 0", "of 0"]


def test_the_gate_costs_microseconds():
    gate = Gate()
    start = time.perf_counter()
    for index in range(10_000):
        gate.enter(index)
    assert (time.perf_counter() - start) / 10_000 < 50e-6


def test_a_group_of_one_is_first():
    assert Group(None, {}).first
