"""Saves that fail, are killed, or involve several processes."""

import logging
import os
import random
import signal
import socket
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import Checkpointer, RecordReader, commit
from colossax.errors import CheckpointError
from tests.checkpoint.support import (
    MODEL,
    assert_restored,
    finish_children,
    layouts,
    mesh_of,
    plain,
    put,
    start_child,
    wants,
)


def big_and_small():
    """20 kB in one file, and 40 B."""
    big = [(plain("model/params/w", (50, 100)), jnp.ones((50, 100)))]
    return big, [(plain("model/params/w", (10,)), jnp.ones(10))]


def wait_for_error(checkpointer):
    deadline = time.monotonic() + 20
    while (error := checkpointer.last_error()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return error


def test_a_failed_save_is_reported_and_training_goes_on(devices, tmp_path, file_size_limit, capfd):
    big, small = big_and_small()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.save(1, small, {"position": 1})
        checkpointer.wait()
        file_size_limit(5000)
        assert checkpointer.save(2, big, {"position": 2})
        error = wait_for_error(checkpointer)
        assert f"step 2 could not be saved in checkpoint directory '{tmp_path}'" in str(error)
        assert "(File too large); make room or choose another directory" in str(error)
        assert checkpointer.last_error() is None, "a failure is handed out once"
        checkpointer.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        assert checkpointer.documents() == {"position": 1}
        assert checkpointer.save(3, small, {"position": 3})
        checkpointer.wait()
        assert checkpointer.steps() == [3]
        file_size_limit()
        assert checkpointer.save(4, big, {"position": 4})
    assert checkpointer.steps() == [4]
    assert "Traceback" not in capfd.readouterr().err


def test_wait_and_close_raise_what_was_not_asked_for(devices, tmp_path, file_size_limit):
    big, small = big_and_small()
    checkpointer = Checkpointer(tmp_path)
    file_size_limit(5000)
    checkpointer.save(1, big, {})
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        checkpointer.wait()
    checkpointer.wait()
    checkpointer.save(2, big, {})
    assert checkpointer.save(3, small, {}), "the save after a failed one"
    with pytest.raises(CheckpointError, match="step 2 could not be saved"):
        checkpointer.close()
    assert checkpointer.steps() == [3]


def test_a_save_that_cannot_start(devices, tmp_path, file_size_limit):
    _, small = big_and_small()
    (tmp_path / "file").write_text("x")
    checkpointer = Checkpointer(tmp_path / "file/run")
    assert not checkpointer.save(1, small, {})
    assert "a checkpoint could not be saved in checkpoint directory" in str(
        checkpointer.last_error()
    )
    with Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        assert checkpointer.save(1, small, {})
        file_size_limit(1)
        assert not checkpointer.save(2, small, {})
        assert "step 2 could not be saved" in str(checkpointer.last_error())
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
        file_size_limit()
        assert checkpointer.save(3, small, {})
    assert checkpointer.steps() == [1, 3]


def test_a_disk_too_full_for_orbax_own_files(devices, tmp_path, file_size_limit, capfd):
    _, small = big_and_small()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 3, 5):
            assert checkpointer.save(step, small, {})
            checkpointer.wait()
            file_size_limit(20)  # enough for the file that tries whether writing works
            checkpointer.save(step + 1, small, {})
            assert f"step {step + 1} could not be saved" in str(wait_for_error(checkpointer))
            file_size_limit()
            assert checkpointer.steps() == [step]
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_document_fails_the_step(devices, tmp_path, file_size_limit):
    _, small = big_and_small()
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        file_size_limit(5000)
        assert not checkpointer.save(1, small, {"tokenizer": "x" * 10000})
        assert "step 1 could not be saved" in str(checkpointer.last_error())
    assert checkpointer.steps() == []


def complete_step(directory):
    """The latest step, after checking every value of it."""
    reader = RecordReader(directory)
    assert reader.documents() == {"position": reader.step}
    assert len(reader.records()) == 20
    for name in reader.records():
        value = 100.0 * reader.step + int(name.removeprefix("model/params/w"))
        assert (reader.read(name) == np.float32(value)).all()
    return reader.step


def test_killed_at_random_moments(devices, tmp_path):
    generator, latest, leftovers = random.Random(0), 0, 0
    for _ in range(3):
        child = start_child("save_forever", tmp_path)
        for _ in range(3):
            assert child.stdout.readline(), child.stderr.read()
        time.sleep(generator.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        leftovers += any("tmp" in path.name for path in tmp_path.iterdir())
        found = complete_step(tmp_path)
        assert found > latest
        latest = found
    assert leftovers, "no kill hit a save"
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(latest + 1, put(MODEL[:1], mesh_of(x=1), [P()]), {})
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_two_processes(devices, tmp_path):
    """One process of eight devices -> two of four -> one, and a failure in either of the two."""
    mesh, specs = layouts()["fsdp8"]
    with Checkpointer(tmp_path / "one") as checkpointer:
        checkpointer.save(0, put(MODEL, mesh, specs), {})
    port = free_port()
    children = [
        start_child("two_processes", process, port, tmp_path / "one", tmp_path / "two")
        for process in range(2)
    ]
    first, second = finish_children(*children)
    for output, culprit_step, other_step, hint in (
        (first, 3, 2, "process 1 could not write its part"),
        (second, 2, 3, "another process could not write its part"),
    ):
        refusal = f"could not be saved in checkpoint directory '{tmp_path / 'two'}'"
        assert f"step {culprit_step} {refusal} (No space left on device); make room" in output
        assert f"step {other_step} {refusal} ({hint}); make room" in output
    checkpointer = Checkpointer(tmp_path / "two")
    assert checkpointer.steps() == [1, 4]
    assert checkpointer.documents() == {"position": 4}
    asked = wants(MODEL, mesh, specs)
    assert_restored(checkpointer.restore(4, asked), asked)
    assert not list((tmp_path / "two").rglob("written-by-*"))


def test_orbax_alone_reads_parameters_and_documents(devices, tmp_path):
    mesh, specs = layouts()["fsdp8"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, put(MODEL, mesh, specs), {"plan": {"a": 1}})
    want = {slot.name: slot for slot in MODEL}
    for restorer in (ocp.PyTreeCheckpointer(), ocp.StandardCheckpointer()):
        tree = restorer.restore(tmp_path / "5/arrays/model/params")
        q = tree["layers"]["attn"]["q"]["w"]
        reader = RecordReader(tmp_path)
        assert q.tobytes() == reader.read("model/params/layers/attn/q/w").tobytes()
        assert set(tree) == {"embed", "layers", "norm"}
        assert tree["norm"]["scale"].dtype == want["model/params/norm/scale"].dtype
        restorer.close()
    handler = ocp.JsonCheckpointHandler()
    assert handler.restore(tmp_path / "5/plan") == {"a": 1}


@pytest.mark.catches("own-failure-logged")
@pytest.mark.parametrize("place", ["orbax/checkpoint/futures.py", "absl/logging/__init__.py"])
def test_a_failure_that_is_reported_is_not_logged_with_its_traceback(place):
    error = CheckpointError("File too large")
    raised = (CheckpointError, error, None)
    record = logging.LogRecord("absl", logging.ERROR, f"/lib/{place}", 1, "failed", (), raised)
    assert not commit._OwnFailures().filter(record)
    other = logging.LogRecord("absl", logging.ERROR, f"/lib/{place}", 1, "failed", (), None)
    assert commit._OwnFailures().filter(other)
