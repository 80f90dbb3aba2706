"""The loop and what it writes, with a step that only counts."""

import io
import itertools
import json
import math
import os
import time

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

from colossax.layerwise import Maximum
from colossax.planner.counting.flops import Yardstick, peak_flops
from colossax.processes import Gate
from colossax.run.meter import Meter
from colossax.run.plot import plot_losses, smooth
from colossax.run.progress import Bar, Lines, Screen
from colossax.run.records import Records, finite, keep_until, read_records
from colossax.run.run import Hooks, Loop, Schedule
from colossax.run.trackers import About
from colossax.tasks.next_token import mean_loss
from tests.plugins.pace import pace_of, probe


class Counting:
    """A step whose state is a count; says when metrics are read."""

    def __init__(self, skip=()):
        self.log = []
        self._skip = set(skip)
        self._skipped = 0

    def __call__(self, state, batch):
        done = state["done"] + 1
        self.log.append(f"step {done} of batch {batch['number']}")
        self._skipped += done in self._skip
        loss = math.nan if done in self._skip else 10.0 / done
        names = {"loss": loss, "grad_norm": 1.0, "tokens": 100.0, "skipped": self._skipped}
        return {"done": done}, {name: jnp.float32(value) for name, value in names.items()}


def about(folder, from_step=0):
    return About(folder=folder, name="counting", config={}, from_step=from_step)


def batches(start):
    return ({"number": number} for number in itertools.count(start))


def looped(
    steps, *, validate_every=0, checkpoint_every=0, start=0, gate=None, skip=(), stop_after=0
):
    """Run a loop; returns what happened in order, and the loop."""
    step, screen = Counting(skip), io.StringIO()
    hooks = Hooks(
        record=lambda record: step.log.append(
            f"record {record['step']} {'grad_norm' if 'grad_norm' in record else 'step'}"
        ),
        validate=lambda state: (
            step.log.append(f"validate {state['done']}") or {"validation_loss": 0.5}
        ),
        save=lambda state, done: step.log.append(f"save {done}"),
        progress=Screen(visible=True, stream=screen),
    )
    schedule = Schedule(
        steps=steps,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        stop_after_skipped=stop_after,
    )
    meter = Meter(Yardstick(flops_per_token=6, peak=None))
    loop = Loop(step, schedule, hooks, gate or Gate(start), meter)
    state, done = loop.run({"done": start}, batches(start), start)
    return (state["done"], done), step.log, loop, screen.getvalue()


def test_metrics_are_read_one_step_late_and_in_order():
    result, log, loop, _ = looped(3)
    assert result == (3, 3)
    assert log == [
        "step 1 of batch 0",
        "step 2 of batch 1",
        "record 1 grad_norm",
        "step 3 of batch 2",
        "record 2 grad_norm",
        "record 3 grad_norm",
        "validate 3",
        "record 3 step",
        "save 3",
    ]
    assert loop.last["loss"] == pytest.approx(10 / 3)
    assert (loop.meter.tokens, loop.evaluated["validation_loss"]) == (300, 0.5)


@pytest.mark.catches("records-late")
def test_records_come_before_the_checkpoint_that_follows_them():
    _, log, _, _ = looped(5, checkpoint_every=2)
    for done in (2, 4, 5):
        assert log.index(f"record {done} grad_norm") < log.index(f"save {done}")
    assert [line for line in log if line.startswith("save")] == ["save 2", "save 4", "save 5"]


def test_the_last_step_is_validated_and_saved_once():
    _, log, _, _ = looped(4, checkpoint_every=2, validate_every=2)
    assert [line for line in log if "validate" in line] == ["validate 2", "validate 4"]
    assert [line for line in log if "save" in line] == ["save 2", "save 4"]


def test_a_resumed_run_starts_at_its_batch_and_one_with_nothing_left_saves_nothing():
    result, log, _, _ = looped(5, start=3)
    assert log[0] == "step 4 of batch 3" and result == (5, 5)
    result, log, _, _ = looped(5, start=5)
    assert result == (5, 5)
    assert log == ["validate 5", "record 5 step"]


def test_a_stop_saves_without_validating():
    gate = Gate()
    gate.open_until(2, "SIGTERM")
    result, log, _, _ = looped(9, gate=gate)
    assert result == (2, 2)
    assert log[-1] == "save 2" and not any("validate" in line for line in log)


@pytest.mark.catches("last-evaluation-of-one-process")
@pytest.mark.parametrize("until, evaluated", [(3, False), (4, True)])
def test_told_to_stop_in_the_last_step_it_evaluates_where_another_process_does(until, evaluated):
    class Told(Gate):
        def enter(self, index):
            through = super().enter(index)
            if index == 2:
                self.open_until(until, "SIGTERM")
            return through

    result, log, _, _ = looped(3, gate=Told())
    assert result == (3, 3) and log[-1] == "save 3"
    assert ("validate 3" in log) == evaluated


def test_skipped_steps_are_told():
    _, _, loop, screen = looped(5, skip=(2, 4))
    assert loop.meter.skipped == 2
    assert "step 2 was skipped: its loss or gradient norm is not finite (1 so far)" in screen
    assert "step 4 was skipped: its loss or gradient norm is not finite (2 so far)" in screen


@pytest.mark.catches("skipped-never-ends")
@pytest.mark.catches("skipped-counted-in-all")
@pytest.mark.catches("skipped-checkpoint")
def test_so_many_skipped_steps_in_a_row_end_a_run_and_leave_its_last_good_checkpoint():
    result, log, loop, _ = looped(20, checkpoint_every=2, skip=(3, 5, 6, 7, 8), stop_after=3)
    assert result == (7, 7) and loop.hopeless
    assert [line for line in log if line.startswith("save")] == ["save 2", "save 4"]
    assert log[-1] == "record 7 grad_norm"
    for never in ({"stop_after": 0}, {"stop_after": 5}):
        result, log, loop, _ = looped(10, skip=(3, 5, 6, 7, 8), **never)
        assert result == (10, 10) and not loop.hopeless and log[-1] == "save 10"


@pytest.mark.catches("validation-by-batch")
def test_validation_weighs_tokens_not_batches():
    def evaluate(state, batch):
        return {"cross_entropy": (jnp.float32(batch["total"]), jnp.float32(batch["weight"]))}

    held_out = [{"total": t, "weight": w} for t, w in [(30.0, 10.0), (1.0, 1.0), (0.0, 0.0)]]
    assert mean_loss(evaluate, {}, held_out) == pytest.approx(31 / 11)


@pytest.mark.catches("validation-of-all-counts")
def test_validation_leaves_arrays_and_maxima_that_layers_count_alone():
    def evaluate(state, batch):
        weight = jnp.float32(batch["weight"])
        loads, passes = (jnp.ones((2, 4)), weight), Maximum(jnp.ones(2))
        pair = (3 * weight, weight)
        return {"cross_entropy": pair, "expert_load": loads, "dispatch_passes": passes}

    assert mean_loss(evaluate, {}, [{"weight": 1.0}, {"weight": 2.0}]) == pytest.approx(3)


def test_python_costs_less_than_a_millisecond_a_step(tmp_path):
    """Everything the loop does around a step that takes no time, files and screen included."""
    steps = 300
    records = Records(about(tmp_path), report=pytest.fail)
    screen = Screen(visible=True, stream=io.StringIO())
    screen.start(steps=steps, done=0)
    hooks = Hooks(record=records.write, validate=lambda s: {}, save=print, progress=screen)
    meter = Meter(Yardstick(flops_per_token=6, peak=1e12))
    metrics = Counting()({"done": 0}, {"number": 0})[1]
    schedule = Schedule(steps=steps, validate_every=0, checkpoint_every=0)
    loop = Loop(lambda state, batch: (state, metrics), schedule, hooks, Gate(), meter)
    paces, start = [probe() for _ in range(10)], time.process_time()
    loop.run({"done": 0}, batches(0), 0)
    seconds = time.process_time() - start
    records.close()
    paces += [probe() for _ in range(10)]
    assert seconds / steps / pace_of(paces) < 1e-3  # of the core that `pace` names


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_records_of_steps_to_come_are_dropped_and_a_torn_line_with_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2}, {"step": 2, "validation_loss": 1.0}, {"step": 3})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    keep_until(path, 2, report=pytest.fail)
    assert [r["step"] for r in read_records(path)] == [1, 2, 2]
    keep_until(tmp_path / "none.jsonl", 0, report=pytest.fail)
    assert list(read_records(tmp_path / "none.jsonl")) == []


def events(folder):
    """Every event of every file, in order, through TensorBoard's framing."""
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_records_reach_both_files(tmp_path):
    for start in (0, 2):
        records = Records(about(tmp_path, start), report=pytest.fail)
        for step in (start + 1, start + 2, start + 3):
            loss = math.inf if step == 2 else float(step)
            records.write({"step": step, "loss": loss})
        records.close()
    lines = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(r["step"], r["loss"]) for r in lines] == [
        (1, 1.0), (2, None), (3, 3.0), (4, 4.0), (5, 5.0)
    ]  # fmt: skip
    seen = list(events(tmp_path / "tensorboard"))
    assert [e.file_version for e in seen if e.file_version] == ["brain.Event:2"] * 2
    assert [e.step for e in seen if e.session_log.status == 1] == [3], "step 3 replaces the old one"
    scalars = [(e.step, v.tag, v.simple_value) for e in seen for v in e.summary.value]
    assert scalars == [(1, "loss", 1.0), (3, "loss", 3.0)] + [
        (step, "loss", float(step)) for step in (3, 4, 5)
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_the_records_but_not_the_run(tmp_path):
    told = []
    records = Records(about(tmp_path), report=told.append)
    records._lines.close()
    records._lines = open("/dev/full", "w")
    for step in (1, 2, 3):
        records.write({"step": step, "loss": 1.0})
    records.close()
    assert told == ["metrics are no longer written (No space left on device); training goes on"]


def test_numbers_json_lacks_become_null():
    assert finite({"a": math.nan, "b": -math.inf, "c": 1, "d": 0.5}) == {
        "a": None, "b": None, "c": 1, "d": 0.5
    }  # fmt: skip


def test_the_picture_is_drawn_from_whatever_there_is(tmp_path):
    path = tmp_path / "loss.png"
    rows = [{"step": s, "loss": 5.0 / s} for s in range(1, 50)]
    rows += [{"step": 20, "loss": None}, {"step": 49, "validation_loss": 1.0}]
    plot_losses(rows, path, title="a run", baselines={"unigram_entropy": 4.0})
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_losses([], path, title="nothing yet")
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0] * 3), "no drift at the start"
    assert smooth([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])


def test_lines_now_and_then():
    stream = io.StringIO()
    lines = Lines(3, stream)
    for step in (1, 2, 3):
        lines.step(step, 2.0, 1234.5, 0.415)
    assert stream.getvalue().splitlines() == [
        "step 1/3  loss 2.0000  1,234 tokens/s  MFU 41.5%",
        "step 3/3  loss 2.0000  1,234 tokens/s  MFU 41.5%",
    ]


def test_the_bar_shows_loss_speed_mfu_and_time_left():
    stream = io.StringIO()
    bar = Bar(10, 4, stream)
    bar.step(5, 2.5, 1234.5, 0.415)
    bar.note("a note [not markup]")
    bar.close()
    shown = stream.getvalue()
    for part in ("5/10", "loss 2.500", "1,234 tokens/s", "MFU 42%", "left", "a note [not markup]"):
        assert part in shown, part


def test_a_hidden_screen_shows_nothing():
    stream = io.StringIO()
    screen = Screen(visible=False, stream=stream)
    screen.start(steps=3, done=0)
    screen.step(1, 2.0, 3.0, None)
    screen.note("hidden")
    screen.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    "kind, dtype, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "float32", 494.7),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA A100-SXM4-80GB", "float16", 312),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA H100 80GB HBM3", "float8", 1978),
        ("NVIDIA L4", "float8", 242),
    ],
)
def test_peaks_are_found_by_the_longest_name(kind, dtype, tflops):
    assert peak_flops(kind, dtype) == pytest.approx(tflops * 1e12)


def test_mfu_is_unknown_where_the_peak_is():
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None
    assert peak_flops("NVIDIA A10G", "float8") is None
    assert Yardstick(flops_per_token=6, peak=None).mfu(100.0) is None
    assert Yardstick(flops_per_token=10, peak=4000.0).mfu(100.0) == pytest.approx(0.25)
