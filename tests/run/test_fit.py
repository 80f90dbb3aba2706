"""A step of `boost` in the loop of `colossax train`: batches of one's own, callbacks, resumed."""

import inspect
import itertools
import json
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import colossax
from colossax.checkpoint import Checkpointer
from colossax.errors import InputError
from colossax.run import AverageEvaluation, BestCheckpoint, Callback, EarlyStopping
from colossax.run.own_step import check_fit
from colossax.run.plot import metrics_of
from colossax.run.records import read_records
from colossax.sharding import replicated
from tests.run.test_task import PLAN, TwoLayers, r2, rows, squares

STEPS = 6


def boosted(optimizer=None, **options):
    return colossax.boost(
        TwoLayers,
        optimizer or optax.adam(1e-2),
        squares,
        PLAN,
        devices=jax.devices()[:2],
        batch_dims={"x": ("batch", None), "y": ("batch",)},
        **options,
    )


def fitted(out, batches=rows, *, steps=STEPS, optimizer=None, **options):
    state, step = boosted(optimizer)
    options = {"evaluators": {"fit": r2}, "validate_every": 2, **options}
    return colossax.fit(state, step, batches, steps=steps, out=str(out), **options)


def losses(out):
    records = read_records(out / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def evaluations(out, name="r2"):
    return dict(metrics_of(read_records(out / "metrics.jsonl"))[name])


class FromAnyNumber:
    def __init__(self):
        self.asked = []

    def batches(self, start_step):
        self.asked.append(start_step)
        return (rows(number) for number in itertools.count(start_step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped, and its losses by a loop written out."""
    out = tmp_path_factory.mktemp("whole")
    state, outcome = fitted(out)
    by_hand, step = boosted()
    expected = {}
    for number in range(STEPS):
        by_hand, metrics = step(by_hand, rows(number))
        expected[number + 1] = metrics["loss"].item()
    assert losses(out) == expected
    assert all(
        map(np.array_equal, jax.tree.leaves(by_hand["params"]), jax.tree.leaves(state["params"]))
    )
    return out, outcome


def test_it_is_the_loop_written_out_with_everything_around_it(whole, capsys):
    out, outcome = whole
    assert outcome.final["step"] == STEPS and outcome.stopped_by is None
    assert outcome.final["r2"] == evaluations(out)[STEPS]
    assert sorted(evaluations(out)) == [2, 4, 6]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Checkpointer(out / "checkpoints").latest() == STEPS


@pytest.mark.catches("fit-resumed-from-the-first-batch")
@pytest.mark.parametrize(
    "batches",
    [
        rows,
        FromAnyNumber(),
        [rows(number) for number in range(STEPS)],
        lambda: (rows(number) for number in range(STEPS)),
    ],
    ids=["function", "object", "list", "generator"],
)
def test_batches_of_any_kind_go_on_where_they_were(whole, tmp_path, batches):
    def source():
        is_generator = getattr(batches, "__name__", "") == "<lambda>"
        return batches() if is_generator else batches

    state, first = fitted(tmp_path, source(), steps=3)
    assert int(state["step"]) == 3
    _, second = fitted(tmp_path, source(), resume="auto")
    assert losses(tmp_path) == losses(whole[0])
    assert second.final["r2"] == whole[1].final["r2"]
    if isinstance(batches, FromAnyNumber):
        assert batches.asked == [0, 3]


def test_a_state_that_was_trained_goes_on_counting_with_an_iterator_as_it_stands(whole, tmp_path):
    state, step = boosted()
    endless = (rows(number) for number in itertools.count())
    state, _ = colossax.fit(state, step, endless, steps=2, out=str(tmp_path / "first"))
    state, _ = colossax.fit(state, step, endless, steps=STEPS, out=str(tmp_path / "second"))
    assert {**losses(tmp_path / "first"), **losses(tmp_path / "second")} == losses(whole[0])


@pytest.mark.catches("begun-forgotten")
@pytest.mark.parametrize("at", [2, 3, 4], ids=["earlier", "the same", "later"])
def test_whatever_state_is_given_a_resumed_run_has_the_batches_that_follow(whole, tmp_path, at):
    dataset = [rows(number) for number in range(STEPS)]
    fitted(tmp_path, dataset, steps=3)
    state, step = boosted()
    for number in range(at):
        state, _ = step(state, rows(number))
    options = {"steps": STEPS, "out": str(tmp_path), "resume": True}
    colossax.fit(state, step, dataset, **options)
    assert losses(tmp_path) == losses(whole[0])
    fitted(tmp_path, dataset, steps=STEPS + 1, resume=True)
    assert max(losses(tmp_path)) == STEPS + 1, "what it began with is still known"


def test_a_run_that_cannot_have_had_a_state_is_not_resumed_from_it(tmp_path):
    dataset = [rows(number) for number in range(STEPS)]
    state, step = boosted()
    state, _ = step(state, rows(0))
    colossax.fit(state, step, dataset, steps=2, out=str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"was begun after step 1, and .* after step 0 alone"):
        fitted(tmp_path, dataset, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_list_is_begun_again_and_an_iterator_that_ends_ends_the_run(tmp_path, capsys):
    two = [rows(0), rows(1)]
    fitted(tmp_path / "list", two, steps=4)
    fitted(tmp_path / "written out", two + two, steps=4)
    assert losses(tmp_path / "list") == losses(tmp_path / "written out")
    state, outcome = fitted(tmp_path / "iterator", iter(two), steps=4)
    assert outcome.final["step"] == 2 == Checkpointer(tmp_path / "iterator/checkpoints").latest()
    assert "the batches ended after step 2" in capsys.readouterr().err
    assert evaluations(tmp_path / "iterator") == {2: outcome.final["r2"]}


@pytest.mark.catches("done-is-lost-with-its-batches")
@pytest.mark.catches("error-of-batches-ends-well")
@pytest.mark.catches("last-step-is-not-told")
def test_what_is_done_is_saved_before_an_error_of_the_batches_ends_the_run(whole, tmp_path):
    def broken(number):
        if number == 3:
            raise OSError("the disk is gone")
        return rows(number)

    with pytest.raises(OSError, match="the disk is gone"):
        fitted(tmp_path, broken)
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    assert Checkpointer(tmp_path / "checkpoints").latest() == 3
    fitted(tmp_path, rows, resume=True)
    assert losses(tmp_path) == losses(whole[0])


@pytest.mark.catches("skipped-steps-are-kept")
def test_skipped_steps_are_not_saved_for_an_error_of_the_batches(tmp_path):
    def broken(number):
        if number == 3:
            raise OSError("the disk is gone")
        batch = rows(number)
        return {**batch, "x": batch["x"] * (np.nan if number == 2 else 1)}

    with pytest.raises(OSError, match="the disk is gone"):
        fitted(tmp_path, broken, validate_every=0)
    assert Checkpointer(tmp_path / "checkpoints").latest() is None


@pytest.mark.catches("fit-skips-for-ever")
def test_so_many_skipped_steps_as_are_asked_for_end_it_with_a_failure(tmp_path):
    def broken(number):
        batch = rows(number)
        return {**batch, "x": batch["x"] * (np.nan if number > 1 else 1)}

    _, outcome = fitted(tmp_path / "two", broken, stop_after_skipped=2)
    assert outcome.final["step"] == 4
    assert "stopped at step 4: the last 2 steps were skipped" in outcome.failure
    _, outcome = fitted(tmp_path / "never", broken, stop_after_skipped=0)
    assert outcome.final["step"] == STEPS and outcome.failure is None


def test_what_is_no_state_step_evaluator_or_batch_is_refused():
    state, step = boosted()
    with pytest.raises(InputError, match="the first two arguments are a state and a step"):
        check_fit(step, state, rows, None)
    with pytest.raises(InputError, match="evaluators come by name"):
        check_fit(state, step, rows, [r2])
    with pytest.raises(InputError, match="batches are of type int; give an iterable"):
        check_fit(state, step, 7, None)


@pytest.mark.catches("finished-run-goes-on")
def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(whole, capsys):
    out, outcome = whole

    def contents():
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]

    before = contents()
    for resume in (True, "auto"):
        state, again = fitted(out, resume=resume)
        assert contents() == before
        assert f"{out} is finished (its {STEPS} steps are done)" in capsys.readouterr().err
        assert int(state["step"]) == STEPS and again.stopped_by is None
        same = ("step", "loss", "r2", "checkpoint", "plan", "parameters")
        assert {n: again.final[n] for n in same} == {n: outcome.final[n] for n in same}


class Remembering(Callback):
    """Keeps what it saw, and stops or interrupts where it is told."""

    every = 2

    def __init__(self, *, interrupt_at=None):
        self.seen, self._interrupt_at = [], interrupt_at

    def start(self, step, state):
        self.seen = []

    def __call__(self, now):
        self.seen.append([now.done, round(now.metrics["loss"], 6), sorted(now.evaluated)])
        if now.done == self._interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # the thread that heeds it may have to wait for a processor

    def saved(self):
        return self.seen

    def resume(self, saved):
        self.seen = saved


@pytest.mark.catches("callback-state-forgotten")
def test_callbacks_see_their_steps_and_remember_over_a_resumption(whole, tmp_path):
    names = ["r2", "rows_seen"]
    expected = [
        [done, round(loss, 6), names if done in (3, 6) else []]
        for done, loss in losses(whole[0]).items()
        if done % 2 == 0 or done == 3
    ]
    one, again = Remembering(interrupt_at=4), Remembering()
    stopped = fitted(tmp_path, callbacks=[one], validate_every=3)[1]
    assert stopped.stopped_by == "SIGTERM" and stopped.final["step"] in (4, 5)
    assert one.seen == expected[:3]
    fitted(tmp_path, callbacks=[again], validate_every=3, resume=True)
    assert again.seen == expected


def test_a_function_logs_and_stops(tmp_path, capsys):
    def watch(now):
        if now.done % 2 == 0:
            now.log({"twice": 2.0 * now.done})
        if now.done == 4:
            now.note("told")
            now.stop("enough was seen")

    _, outcome = fitted(tmp_path, callbacks=[watch], validate_every=0)
    assert dict(metrics_of(read_records(tmp_path / "metrics.jsonl")))["twice"] == [(2, 4), (4, 8)]
    assert outcome.final["step"] == 4 and evaluations(tmp_path) == {4: outcome.final["r2"]}
    assert outcome.final["ended_by"] == {"by": "watch", "why": "enough was seen"}
    shown = capsys.readouterr().err
    assert "told" in shown and "ended by watch after step 4: enough was seen" in shown
    with pytest.raises(InputError, match="callback: logs 'loss', which there is already"):
        fitted(tmp_path / "taken", callbacks=[lambda now: now.log({"loss": 1.0})])


@pytest.mark.catches("scalar-logged-as-it-is")
def test_a_scalar_of_jax_is_logged_as_the_number_it_is_and_an_array_refused(tmp_path):
    def norm(now):
        w = now.state["params"]["out"]
        now.log({"norm": jnp.linalg.norm(w), "half": np.float32(0.5), "count": now.done})

    state, _ = fitted(tmp_path, callbacks=[norm])
    found = dict(metrics_of(read_records(tmp_path / "metrics.jsonl")))
    assert [value for _, value in found["half"]] == [0.5] * STEPS
    assert dict(found["count"]) == {done: done for done in range(1, STEPS + 1)}
    last = float(np.linalg.norm(np.asarray(state["params"]["out"])))
    assert dict(found["norm"])[STEPS] == pytest.approx(last, rel=1e-6)
    for value in (jnp.ones(3), "0.5", None):
        folder = tmp_path / type(value).__name__
        with pytest.raises(InputError, match="callback: logs 'w', which is no number but of type"):
            fitted(folder, callbacks=[lambda now, value=value: now.log({"w": value})])


@pytest.mark.catches("hyperparameter-unchanged")
def test_a_hyperparameter_that_is_changed_is_trained_with_recorded_and_resumed(tmp_path):
    rates = {1: 1e-2, 2: 1e-2, 3: 5e-3, 4: 5e-3, 5: 2.5e-3, 6: 2.5e-3}

    def halve(now):
        if now.done in (2, 4):
            now.set_hyperparameter("learning_rate", 1e-2 / now.done)

    def injected():
        numbers = ("b1", "b2", "eps", "eps_root")  # rounded to float32 if they were injected
        return optax.inject_hyperparams(optax.adam, static_args=numbers)(learning_rate=1e-2)

    fitted(tmp_path, optimizer=injected(), callbacks=[halve], steps=5)
    fitted(tmp_path, optimizer=injected(), callbacks=[halve], resume=True)
    steps = [r for r in read_records(tmp_path / "metrics.jsonl") if "loss" in r]
    assert {r["step"]: r["learning_rate"] for r in steps} == pytest.approx(rates)

    piecewise = optax.piecewise_constant_schedule(1e-2, {2: 0.5, 4: 0.5})
    fitted(tmp_path / "schedule", optimizer=optax.adam(piecewise), learning_rate=piecewise)
    steps = [r for r in read_records(tmp_path / "schedule/metrics.jsonl") if "loss" in r]
    assert {r["step"]: r["learning_rate"] for r in steps} == pytest.approx(rates)
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "schedule"), rel=1e-6)


def test_a_number_that_is_none_or_scheduled_is_refused(tmp_path):
    def set_(name):
        return [lambda now: now.set_hyperparameter(name, 1.0)]

    scheduled = optax.inject_hyperparams(optax.adam)(learning_rate=optax.constant_schedule(1.0))
    with pytest.raises(InputError, match="'momentum': those that can be changed are .*learning_ra"):
        fitted(tmp_path / "a", callbacks=set_("momentum"), optimizer=scheduled)
    with pytest.raises(InputError, match="'learning_rate': a schedule decides it"):
        fitted(tmp_path / "b", callbacks=set_("learning_rate"), optimizer=scheduled)
    with pytest.raises(InputError, match="there are none; make the optimizer by optax.inject"):
        fitted(tmp_path / "c", callbacks=set_("learning_rate"))


def falling(values):
    """An evaluator that gives these one after another, by the step."""
    return {"fall": lambda step, state: {"fall": values[int(state["step"]) - 1]}}


@pytest.mark.catches("early-stopping-patience")
@pytest.mark.catches("stopped-run-goes-on")
def test_early_stopping_counts_over_a_resumption_and_has_the_last_word(tmp_path, capsys):
    values = [3.0, 2.0, 2.5, float("nan"), 1.9, 2.1, 2.2, 2.3, 9.0, 9.0]
    options = {"evaluators": falling(values), "validate_every": 1}

    def stopping():
        return [EarlyStopping("fall", patience=3)]

    fitted(tmp_path, steps=7, callbacks=stopping(), **options)
    _, outcome = fitted(tmp_path, steps=10, callbacks=stopping(), resume=True, **options)
    assert outcome.final["step"] == 8
    assert outcome.final["ended_by"]["why"] == "fall has not improved in 3 evaluations"
    _, again = fitted(tmp_path, steps=10, callbacks=stopping(), resume="auto", **options)
    assert again.final["step"] == 8 and again.final["ended_by"]["by"] == "EarlyStopping"
    assert "is finished (EarlyStopping: fall has not improved in 3" in capsys.readouterr().err
    _, further = fitted(tmp_path, steps=10, resume=True, **options)
    assert further.final["step"] == 10, "without the callback it goes on"
    with pytest.raises(InputError, match="EarlyStopping: no evaluator gives a metric 'r3', only r"):
        fitted(tmp_path / "other", callbacks=[EarlyStopping("r3")])


@pytest.mark.catches("best-is-the-last")
def test_the_best_checkpoint_is_kept_apart_and_compared_over_a_resumption(tmp_path):
    values = [3.0, 1.0, 2.0, 2.0, 1.5, 1.2]
    for steps in (4, 6):
        fitted(
            tmp_path,
            steps=steps,
            evaluators=falling(values),
            validate_every=1,
            callbacks=[BestCheckpoint("fall"), BestCheckpoint("fall", larger=True, folder="worst")],
            resume="auto",
        )
    for folder, step in (("best", 2), ("worst", 1)):
        kept = Checkpointer(tmp_path / folder)
        assert kept.steps() == [step]
    again, _ = fitted(tmp_path / "again", steps=2)
    shapes, step = boosted()
    slots = colossax.run.checkpointing.RunCheckpoints(
        tmp_path / "best", step, keep=1, documents={}, report=pytest.fail
    )
    best = slots.restore(2)
    assert all(
        map(np.array_equal, jax.tree.leaves(best["params"]), jax.tree.leaves(again["params"]))
    )


@pytest.mark.catches("folder-of-the-run")
@pytest.mark.parametrize(
    "folder", ["checkpoints", "Checkpoints", "offload", "../x", "/x", "", ".."]
)
def test_a_callback_has_a_folder_of_its_own(tmp_path, folder):
    refusal = "callback: saves into folder .*; give a plain name, as 'best', that is none of chec"
    with pytest.raises(InputError, match=refusal):
        BestCheckpoint("r2", folder=folder)
    if folder == "checkpoints":
        with pytest.raises(InputError, match=refusal):
            fitted(tmp_path, steps=2, callbacks=[lambda now: now.save(folder)])


@pytest.mark.catches("average-of-nothing")
def test_the_average_is_evaluated_beside_the_state_and_survives_a_resumption(tmp_path):
    def mean_of_params(step, state):
        return {"mean": float(np.mean(state["params"]["out"]))}

    evaluators = {"evaluators": {"mean": mean_of_params}, "validate_every": 1}
    fitted(tmp_path / "whole", callbacks=[AverageEvaluation(0.8)], **evaluators)
    seen, averages = (evaluations(tmp_path / "whole", n) for n in ("mean", "average_mean"))
    state, _ = boosted()
    mean = mean_of_params(None, state)["mean"]
    for done in range(1, STEPS + 1):
        decay = min(0.8, (1 + done) / (10 + done))
        mean = decay * mean + (1 - decay) * seen[done]
        assert averages[done] == pytest.approx(mean, rel=1e-5)
    for steps in (3, STEPS):
        callbacks = [AverageEvaluation(0.8), BestCheckpoint("average_mean")]
        fitted(tmp_path / "two", steps=steps, callbacks=callbacks, resume="auto", **evaluators)
    assert evaluations(tmp_path / "two", "average_mean") == averages


@pytest.mark.catches("arrays-by-name-are-lost")
@pytest.mark.catches("arrays-of-callbacks-of-one-name")
def test_arrays_of_any_shape_are_kept_for_a_callback(tmp_path):
    """As it has them when a checkpoint is written, also where it has none."""

    class Last(Callback):
        every = 1

        def __init__(self, first):
            self.first = first

        def start(self, step, state):
            self.arrays, self.where = None, replicated(step.bound)

        def __call__(self, now):
            seen.append(None if self.arrays is None else np.asarray(self.arrays["last"]).tolist())
            rows = self.first + np.arange(now.done, dtype=np.float32)
            odd = now.done % 2
            self.arrays = {"last": jax.device_put(rows, self.where)} if odd else None

        def saved(self):
            return self.arrays and self.arrays["last"].size

        def resume(self, saved):
            if saved is not None:
                shape = jax.ShapeDtypeStruct((saved,), np.float32, sharding=self.where)
                self.arrays = {"last": shape}

    seen, found = [], []
    for name, ends in (("whole", (STEPS,)), ("parts", (2, 3, STEPS))):
        for steps in ends:
            fitted(tmp_path / name, steps=steps, callbacks=[Last(0), Last(9)], resume="auto")
        found.append(list(seen))
        seen.clear()
    assert found[0] == found[1]
    assert found[0][:4] == [None, None, [0.0], [9.0]]


@pytest.mark.catches("arrays-of-numpy-end-a-run-late")
def test_arrays_that_no_checkpoint_keeps_are_refused(tmp_path):
    class Counts(Callback):
        def start(self, step, state):
            self.arrays = {"seen": np.zeros(3)}

        def __call__(self, now):
            """Nothing."""

    with pytest.raises(InputError, match="callback 'Counts': its arrays hold a ndarray"):
        fitted(tmp_path, steps=2, callbacks=[Counts()])
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.catches("last-evaluation-alone")
@pytest.mark.catches("averaged-twice")
def test_callbacks_see_the_evaluation_of_a_run_that_ends_before_its_last_step(tmp_path):
    """Its batches end, or a callback ends it, at a step that no evaluation was due at."""

    def stop(now):
        calls.append(now.done)
        if now.done == 3:
            now.stop("enough")

    fitted(tmp_path / "whole", steps=3, callbacks=[AverageEvaluation(0.8)], validate_every=0)
    expected = evaluations(tmp_path / "whole", "average_r2")
    for name, source, more in (
        ("batches", iter([rows(number) for number in range(3)]), []),
        ("stopped", rows, [stop]),
    ):
        calls = []
        callbacks = [AverageEvaluation(0.8), BestCheckpoint("r2", larger=True), *more]
        _, outcome = fitted(tmp_path / name, source, callbacks=callbacks, validate_every=0)
        assert Checkpointer(tmp_path / name / "best").steps() == [3]
        assert evaluations(tmp_path / name, "average_r2") == expected and list(expected) == [3]
        assert outcome.final["average_r2"] == expected[3]
        assert calls == ([1, 2, 3] if more else []), "a function is called once after every step"


@pytest.mark.parametrize("callback", [EarlyStopping, BestCheckpoint, AverageEvaluation])
def test_a_callback_is_short(callback):
    source = inspect.getsource(callback)
    assert len(source.splitlines()) < 30


@pytest.mark.catches("functions-of-one-name")
def test_functions_go_by_their_names_and_there_is_nothing_to_keep_of_them(tmp_path, capsys):
    def first(now):
        pass

    def second(now):
        if now.done == 2:
            now.stop("enough")

    fitted(tmp_path / "a", steps=1, callbacks=[first])
    _, outcome = fitted(tmp_path / "a", steps=4, callbacks=[second, second], resume=True)
    assert outcome.final["ended_by"]["by"] == "second"
    _, again = fitted(tmp_path / "a", steps=4, callbacks=[first, second], resume=True)
    assert again.final["step"] == 2 and again.final["ended_by"]["by"] == "second"
    _, further = fitted(tmp_path / "a", steps=4, callbacks=[first], resume=True)
    assert further.final["step"] == 4, "it is another function that ended it"
    assert "begins anew" not in capsys.readouterr().err


@pytest.mark.catches("what-a-checkpoint-lacks-ends-a-run")
def test_a_run_of_before_callbacks_is_resumed_with_them(whole, tmp_path, capsys):
    fitted(tmp_path, steps=2)
    _, outcome = fitted(tmp_path, steps=4, callbacks=[AverageEvaluation()], resume=True)
    assert "has nothing of AverageEvaluation, which begins anew" in capsys.readouterr().err
    assert json.dumps(outcome.final) and outcome.final["step"] == 4
