"""`auto` takes a kernel once a child process has proved it on the device that is there."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from colossax import compat
from colossax.pallas import choice, target
from colossax.pallas.attention import Mask, attend_block, attention
from colossax.pallas.attention.api import choose
from colossax.pallas.grouped_matmul import grouped_matmul
from colossax.pallas.proof import Outcome, Prover, Verdict, prover, runner, store
from colossax.pallas.target import on_device, target_of
from tests.launching import free_port
from tests.pallas.proof.asking import SPEC, command, hopper
from tests.pallas.proof.children import KIND

ROOT = Path(__file__).resolve().parents[3]
VARIANT = SPEC.variant
PROVED = Verdict(outcome=Outcome.PROVED)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and children that find the tests."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("COLOSSAX_CACHE", str(folder))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.chdir(ROOT)
    return folder


@pytest.fixture
def log(tmp_path):
    """Where children leave a line."""
    return tmp_path / "log"


@pytest.fixture
def told(monkeypatch):
    """Children that are not started: by variant what they would have found, and who was asked."""
    verdicts, asked = {}, []

    def try_variants(variants, device_kind, **how):
        asked.append((list(variants), how))
        return {one: verdicts.get(one, PROVED) for one in variants}

    monkeypatch.setattr(prover, "try_variants", try_variants)
    return types.SimpleNamespace(verdicts=verdicts, asked=asked)


def started(log):
    """Children that were started."""
    return log.read_text().split() if log.exists() else []


def call(fault, log, monkeypatch, **how):
    """What the public call says it does on a simulated Hopper GPU."""
    monkeypatch.setattr(choice, "PROVER", Prover(command=command(fault, log), **how))
    q = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
    with on_device(hopper()):
        jax.eval_shape(lambda q: attention(q, q, q, mask=Mask(causal=True)), q)


FAULTS = {
    "wrong": r"packed rows and fewer heads of keys: .* is off by .* of its norm, more than 0\.01",
    "crash": r"the child process crashed with signal 6 \(",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_declined_with_the_reason(fault, log, monkeypatch, caplog):
    choice._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "colossax"):
        call(fault, log, monkeypatch)
    (chosen,) = (line for line in caplog.messages if line.startswith("attention of 2 x 64"))
    assert ": xla (not mosaic: declined by its proof on this device: " in chosen
    assert re.search(FAULTS[fault], chosen), chosen
    assert Prover().kept(VARIANT, KIND).outcome is Outcome.DECLINED
    assert started(log) == [fault]


@pytest.mark.slow
def test_a_kernel_that_hangs_is_declined_in_time(log, monkeypatch):
    own = Prover(command=command("hang", log), limit_s=25.0)
    began = time.monotonic()
    assert own.verdict(VARIANT, KIND).reason == "the child process did not end within 25 s"
    assert time.monotonic() - began < 35
    assert Prover().kept(VARIANT, KIND).outcome is Outcome.DECLINED


@pytest.mark.catches("verdict-of-short-memory")
def test_short_memory_is_no_verdict(log, caplog):
    own = Prover(command=command("memory", log))
    for _ in range(2):
        found = own.verdict(VARIANT, KIND)
    reason = "device memory was short (RESOURCE_EXHAUSTED: Out of memory"
    assert found.outcome is Outcome.UNDECIDED
    assert reason in found.why_not("xla")
    assert sum(reason in line for line in caplog.messages) == 1
    assert started(log) == ["memory"], "once in a run"
    assert Prover().kept(VARIANT, KIND) is None, "and again in the next"


BEGIN = "import os, signal, sys; open(sys.argv[2], 'a').write('{\"begun\": 0}\\n'); "
ENDS = {
    "sys.exit('KeyError: no such key')": ("declined", "exit code 1 (KeyError: no such key)"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("declined", "crashed with signal 11 (it said nothing"),
    "os.kill(os.getpid(), signal.SIGKILL)": ("undecided", "ended by SIGKILL, for lack of memory"),
    "sys.stderr.write('CUDA_ERROR_OUT_OF_MEMORY: out of memory\\n'); os.abort()": (
        "undecided",
        "memory was short in the child process (CUDA_ERROR_OUT_OF_MEMORY",
    ),
}


@pytest.mark.catches("verdict-of-killed-child")
@pytest.mark.parametrize("end", ENDS)
def test_how_a_child_ends_tells_whose_fault_it_was(end):
    command = (sys.executable, "-c", BEGIN + end)
    (found,) = runner.try_variants([VARIANT], KIND, limit_s=20.0, command=command).values()
    outcome, reason = ENDS[end]
    assert found.outcome == outcome
    assert reason in found.reason


def ask(fault, log, cache, *address):
    """A process of its own that asks; `finish` gives what it says."""
    arguments = ("-m", "tests.pallas.proof.asking", fault, str(log), *address)
    environment = {**os.environ, "COLOSSAX_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.catches("verdict-of-another-source")
def test_a_verdict_outlives_the_process(log, cache, monkeypatch):
    """A right kernel is taken, by the next process without a child, until the source changes."""
    own = Prover(command=command("none", log))
    found = own.verdict(VARIANT, KIND)
    assert (found.outcome, found.reason) == (Outcome.PROVED, "")
    assert len(found.seconds) == len(found.peers["xla"]) == 5
    second = finish(ask("wrong", log, cache))
    assert second["chosen"] == "mosaic"
    assert started(log) == ["none"]
    source = cache / "kernel.py"
    source.write_text("changed = True")
    changed = Prover(command=command("crash", log), sources=[*store.SOURCES, source])
    assert changed.verdict(VARIANT, KIND).outcome is Outcome.DECLINED
    assert started(log) == ["none", "crash"]


def test_two_processes_take_the_verdict_of_the_first(tmp_path, monkeypatch):
    """The second would have proved the kernel, and has even done so before."""
    address = f"127.0.0.1:{free_port()}"
    logs, caches = ([tmp_path / f"{name}{i}" for i in range(2)] for name in ("log", "cache"))
    monkeypatch.setenv("COLOSSAX_CACHE", str(caches[1]))
    store.save(VARIANT, store.circumstances(KIND), PROVED)
    asked = [
        ask(fault, logs[i], caches[i], address, str(i)) for i, fault in enumerate(("crash", "none"))
    ]
    first, second = map(finish, asked)
    assert (first["chosen"], second["chosen"]) == ("xla", "xla")
    assert any("crashed with signal 6" in line for line in second["said"])
    assert (started(logs[0]), started(logs[1])) == (["crash"], [])


@pytest.fixture
def job(monkeypatch):
    """A job of two processes whose store is a dict; `wait` is called by who waits in vain."""
    found = types.SimpleNamespace(number=0, values={}, wait=lambda: None)

    def hear(key, timeout_s):
        if key not in found.values:
            found.wait()
        return found.values.get(key)

    monkeypatch.setattr(compat, "place_in_job", lambda: (found.number, 2))
    monkeypatch.setattr(compat, "tell_job", lambda key, value: found.values.setdefault(key, value))
    monkeypatch.setattr(compat, "hear_job", hear)
    return found


@pytest.mark.catches("verdict-told-to-nobody")
def test_a_process_that_has_waited_too_long_decides_for_all(job, told):
    """Else it and process 0, which comes later, would run different programs."""
    job.number = 1
    late = Prover(wait_s=7.0).verdict(VARIANT, KIND)
    assert "process 0 gave no verdict within 7 s" in late.why_not("xla")
    job.number = 0
    assert Prover().verdict(VARIANT, KIND) == late
    assert len(job.values) == 1


def test_alone_and_in_a_job_are_asked_apart(job, told, monkeypatch):
    """A process that has asked before the job began still tells the others."""
    own = Prover()
    with monkeypatch.context() as alone:
        alone.setattr(compat, "place_in_job", lambda: (0, 1))
        own.verdict(VARIANT, KIND)
    own.verdict(VARIANT, KIND)
    assert len(job.values) == len(told.asked) == 1


def test_a_folder_that_cannot_be_written_is_said_once(cache, told, caplog):
    cache.write_text("a file, no folder")
    store._say_unwritable.cache_clear()
    own = Prover()
    others = [VARIANT, dataclasses.replace(VARIANT, soft_cap=True)]
    for one in (*others, *others):
        assert own.verdict(one, KIND).outcome is Outcome.PROVED
    assert len(told.asked) == 2
    assert sum("cannot be written" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"verdict": {"outcome": "maybe"}}'])
def test_a_damaged_file_is_replaced(damage, told, caplog):
    Prover().verdict(VARIANT, KIND)
    path = store.path_of(VARIANT, store.circumstances(KIND))
    path.write_text(damage)
    assert Prover().verdict(VARIANT, KIND).outcome is Outcome.PROVED
    assert len(told.asked) == 2
    assert "the kernel is proved anew" in caplog.text
    assert json.loads(path.read_text())["circumstances"]["device_kind"] == KIND
    assert Prover().kept(VARIANT, KIND) == PROVED


@pytest.mark.parametrize("changed", ["jax", "jaxlib", "ptxas", "device_kind", "source"])
def test_circumstances_tell_verdicts_apart(changed, told):
    here = store.circumstances(KIND)
    store.save(VARIANT, here, PROVED)
    there = dataclasses.replace(here, **{changed: "another"})
    assert store.load(VARIANT, here) == PROVED
    assert store.load(VARIANT, there) is None


def test_the_assembler_is_asked_for_its_version(tmp_path, monkeypatch):
    assembler = tmp_path / "ptxas"
    assembler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    assembler.chmod(0o755)
    monkeypatch.setattr(store, "ptxas_path", lambda: assembler)
    store._ptxas_version.cache_clear()
    assert store.circumstances(KIND).ptxas == "12.9.86"
    store._ptxas_version.cache_clear()


@pytest.mark.catches("verdict-of-short-time")
def test_a_program_waits_a_minute_in_all(told, monkeypatch):
    """What later kernels lack in time is no fault of theirs."""
    clock = iter([0.0, 40.0, 40.0, 58.0])
    monkeypatch.setattr(prover.time, "monotonic", lambda: next(clock))
    own = Prover()
    three = [dataclasses.replace(VARIANT, head_dim=h) for h in (64, 96, 128)]
    found = [own.verdict(one, KIND) for one in three]
    limits = [(how["limit_s"], how["decisive"]) for _, how in told.asked]
    assert limits == [(60.0, True), (20.0, False)]
    assert [one.outcome for one in found] == ["proved", "proved", "undecided"]
    assert "have taken their 60 s" in found[2].reason


@pytest.mark.catches("proof-of-absent-device")
def test_only_a_choice_of_auto_on_a_device_that_is_there_asks(told, monkeypatch):
    monkeypatch.setattr(choice, "PROVER", Prover())
    there = target_of(hopper())
    assert choose(SPEC, there, "mosaic") == "mosaic"
    assert choose(SPEC, dataclasses.replace(there, device_kind=None)) == "mosaic"
    wide = dataclasses.replace(SPEC, dtype=jnp.dtype("float32"))
    assert choose(wide, there) == "xla"
    assert told.asked == []
    told.verdicts[VARIANT] = Verdict.declined("wrong")
    assert choose(SPEC, there) == "xla"
    assert choose(SPEC, there, "mosaic") == "mosaic", "a name overrules the verdict"
    assert [variants for variants, _ in told.asked] == [[VARIANT]]


def test_an_explicit_target_needs_no_proof():
    with on_device(hopper()), target("gpu", compute_capability=(9, 0)) as there:
        assert there.device_kind is None
    assert target_of(hopper()).device_kind == KIND
    assert target_of(types.SimpleNamespace(**vars(hopper()) | {"client": object()})) == there


def test_steps_of_a_ring_and_grouped_matmuls_go_through_the_same_door(told, monkeypatch):
    q, lse = jnp.ones((1, 64, 2, 64), jnp.bfloat16), jnp.zeros((1, 2, 64))
    out = q.astype(jnp.float32)
    x, w = jnp.ones((16, 120), jnp.bfloat16), jnp.ones((2, 120, 256), jnp.bfloat16)

    def step(q, *carried):
        return attend_block(q, q, q, mask=Mask(causal=True), scale=1.0, carried=carried)

    def declined(variants, device_kind, **how):
        told.asked.append(str(variants[0]))
        return {variants[0]: Verdict.declined("wrong")}

    monkeypatch.setattr(prover, "try_variants", declined)
    monkeypatch.setattr(choice, "PROVER", Prover())
    with on_device(hopper()):
        jax.eval_shape(step, q, out, lse)
        jax.eval_shape(grouped_matmul, x, w, jnp.asarray([3, 9]))
    assert told.asked == [
        "attention, heads of 64, bfloat16, steps of a ring",
        "grouped matmul, bfloat16, narrow to wide tiles",
    ]


def test_threads_that_trace_at_once_start_one_child(log, monkeypatch):
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    words = f"open({str(log)!r}, 'a').write('one '); sys.exit()"
    monkeypatch.setattr(choice, "PROVER", Prover(command=(sys.executable, "-c", BEGIN + words)))

    @jax.jit
    def loss(q):
        return jnp.sum(attention(q, q, q, mask=Mask(causal=True)).astype(jnp.float32))

    def trace():
        with on_device(hopper()):
            jax.eval_shape(jax.grad(loss), q)

    threads = [threading.Thread(target=trace) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert started(log) == ["one"]


def test_a_child_that_does_not_begin_says_nothing_of_the_kernel():
    commands = {
        "no child process starts": ("/nowhere/python",),
        "did not begin: the child process ended with exit code 3 (no driver)": (
            sys.executable,
            "-c",
            "import sys; sys.stderr.write('no driver'); sys.exit(3)",
        ),
        "did not begin: the child process did not end within 2 s": (
            sys.executable,
            "-c",
            "import time; time.sleep(100)",
        ),
    }
    for reason, words in commands.items():
        limit_s = 2.0 if "2 s" in reason else 20.0
        found = runner.try_variants([VARIANT], KIND, limit_s=limit_s, command=words)
        assert found[VARIANT].outcome is Outcome.UNDECIDED
        assert reason in found[VARIANT].reason


def test_another_device_in_the_child_says_nothing_of_the_kernel():
    """Of another program's alone, or hidden: the true child, which here finds a CPU."""
    (found,) = runner.try_variants([VARIANT], KIND, limit_s=60.0).values()
    assert found.outcome is Outcome.UNDECIDED
    assert found.reason == f"a second process finds 'cpu' in place of '{KIND}'"


def test_a_child_that_crashes_keeps_what_was_found_before(tmp_path):
    """And the next child goes on with those behind."""
    script = tmp_path / "child.py"
    verdict = json.dumps(PROVED.to_json())
    script.write_text(
        "import json, os, sys\n"
        "asked = json.load(open(sys.argv[1]))['variants']\n"
        "out = open(sys.argv[2], 'a')\n"
        "for n, one in enumerate(asked):\n"
        "    out.write('{\"begun\": %d}\\n' % n); out.flush()\n"
        "    if one['fields']['head_dim'] == 128: os.abort()\n"
        '    out.write(\'{"ended": %d, "verdict": %s}\\n\''
        f" % (n, {verdict!r})); out.flush()\n"
    )
    four = [dataclasses.replace(VARIANT, head_dim=h) for h in (64, 96, 128, 256)]
    own = Prover(command=(sys.executable, str(script)))
    found = dict(own.prove_all(four, KIND, total_s=60.0))
    assert [found[one].outcome for one in four] == ["proved", "proved", "declined", "proved"]
    assert Prover().kept(four[2], KIND).outcome is Outcome.DECLINED
