"""`fit`: the loop of `colossax train` around a step of one's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal

import jax

from colossax.config import to_json
from colossax.errors import InputError
from colossax.processes.group import Group
from colossax.run.options import Outcome, RunConfig, RunOptions
from colossax.run.prepared import Prepared, settle_folder
from colossax.run.run import run_prepared
from colossax.run.run_dir import RunFolder
from colossax.run.sources import BatchSource, with_source
from colossax.run.trackers import DEFAULT_TRACKERS
from colossax.step.checks.given import check_state
from colossax.step.step import Step
from colossax.tasks import Callback, Evaluator, Task
from colossax.tasks.task import ResumableBatches
from colossax.typing import TrainState


def fit(
    state: TrainState,
    step: Step,
    batches: BatchSource,
    *,
    steps: int,
    evaluators: Mapping[str, Evaluator] | None = None,
    callbacks: Sequence[Callable[[Any], None]] = (),
    out: str | None = None,
    resume: bool | Literal["auto"] = False,
    validate_every: int = 0,
    checkpoint_every: int = 0,
    keep: int = 2,
    stop_after_skipped: int = 10,
    trackers: Sequence[str] = DEFAULT_TRACKERS,
    take_over: bool = False,
    name: str = "fit",
    learning_rate: float | Callable[[int], Any] | None = None,
    tokens: int = 0,
    flops: int = 0,
    group: Group | None = None,
) -> tuple[TrainState, Outcome]:
    """Train a state by a step of `colossax.boost`, as `colossax train` does: the same loop.

    Shows progress, writes `metrics.jsonl`, TensorBoard events, checkpoints and `loss.png` into
    `out`. SIGTERM and Ctrl-C end it after a step, saved.

    Args:
        state: To start from, given up; a new run goes on counting from its `step`. One that is
            resumed goes on from its last checkpoint, whatever this is.
        step: See `colossax.boost`.
        batches: Global batches. An object with `batches(start_step)`, which gives them from any
            number on, or a function of the number, is asked for those that follow when a run is
            resumed. Of an iterable whose iterators have `get_state` and `set_state`, as Grain's
            data sets and loaders, each checkpoint keeps the state, to go on from there. Of any
            other, as many as the run has had are then drawn and dropped.
            One that ends and can be iterated anew begins again; at the end of an iterator the run
            ends.
        steps: Optimizer steps in all, those of `state` and those before a resumption included.
        evaluators: `(step, state) -> {metric: number}` by name.
        callbacks: A `colossax.run.Callback` each, or a function of `colossax.run.StepEnd`.
        out: The run's folder; None takes the next number under `runs/`.
        resume: Go on with the run in `out`; `"auto"` starts one where there is none.
        validate_every: Steps between evaluations; 0 evaluates at the end alone.
        checkpoint_every: Steps between checkpoints; 0 saves at the end alone.
        keep: Checkpoints kept.
        stop_after_skipped: Steps skipped in a row, their loss or gradient norm not finite, after
            which the run ends; 0 goes on all the same.
        trackers: See `RunOptions`.
        take_over: Also write into a folder that another run writes into, which then stops.
        name: Of the run, for its folder and picture.
        learning_rate: To be recorded, a number or a function of the updates done. That of
            `optax.inject_hyperparams` is recorded by itself.
        tokens: What a full batch weighs: the step's metric of that name.
        flops: Of the model for such a batch, forward and backward, recomputation not counted; with
            both, and on a device whose peak is known, MFU is told.
        group: The processes, where there are several; it serves one run.

    Returns:
        `(state, outcome)`: the last state, and the run's final numbers. A run that too many
            skipped steps ended raises nothing: `outcome.failure` says in one sentence at which
            step, what was not finite first, and from which checkpoint it goes on. It also says so
            where the last state is not on disk, all steps were skipped, or the folder was taken
            over by another run, deleted or moved; it is None otherwise.

    Raises:
        InputError: Something asked for cannot be done, or another run writes into `out`.
    """
    if jax.process_count() > 1 and (group is None or group.processes == 1):
        raise InputError(
            f"fit: there are {jax.process_count()} processes, which must agree on when to stop;"
            " give group=colossax.processes.join(...)"
        )
    check_fit(state, step, batches, evaluators)
    check_callbacks(callbacks)
    group = Group(None, {}) if group is None else group
    options, folder = settle_folder(
        name,
        RunOptions(out=out, resume=resume, trackers=trackers, take_over=take_over),
        group,
    )
    begun = _begun(state, folder, options, group)
    task = Task(
        name=name,
        make_model=step.spec.make_model,
        optimizer=step.optimizer,
        loss=step.loss_call.loss,
        shapes={},
        batches=(),
        evaluators=evaluators or {},
        callbacks=callbacks,
        learning_rate=_rate(learning_rate),
        tokens=tokens,
        flops=flops,
        options=step.options,
        asked=lambda plan: {"plan": to_json(plan), "begun": begun},
    )
    config = RunConfig(
        plan=step.bound.plan,
        steps=steps,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        keep=keep,
        stop_after_skipped=stop_after_skipped,
    )
    return run_prepared(
        Prepared(
            task=with_source(task, batches, begun=begun),
            config=config,
            options=options,
            group=group,
            plan=step.bound.plan,
            step=step,
            folder=folder,
            identity={},
            state=state,
            begun=begun,
        )
    )


def check_fit(state: Any, step: Any, batches: Any, evaluators: Any) -> None:
    """Refuse what is another thing than `fit` takes, with the call that was meant.

    Raises:
        InputError: One of them is.
    """
    if not isinstance(step, Step) or not isinstance(state, Mapping) or "params" not in state:
        raise InputError(
            "fit: the first two arguments are a state and a step of colossax.boost, as in"
            " fit(state, step, batches, steps=100)"
        )
    check_state(state, step.abstract)
    if not isinstance(batches, ResumableBatches | Iterable) and not callable(batches):
        raise InputError(
            f"fit: batches are of type {type(batches).__name__}; give an iterable of batches, a"
            " function of a batch's number, or an object with batches(start_step)"
        )
    one = isinstance(batches, Mapping)
    if one or (isinstance(batches, Sized) and not len(batches)):
        raise InputError(
            f"fit: batches are {'one batch' if one else 'empty'}; give an iterable of batches, as"
            " [batch], or a function of a batch's number"
        )
    if evaluators is not None and not isinstance(evaluators, Mapping):
        raise InputError(
            'fit: evaluators come by name, as in evaluators={"held_out": evaluate}, each a function'
            " (step, state) -> {metric: number}"
        )


def check_callbacks(callbacks: Any) -> None:
    """Refuse what is no list of callbacks.

    Raises:
        InputError: With what was found.
    """
    listed = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
    for one in callbacks if listed else [callbacks]:
        if not listed or isinstance(one, type) or not (callable(one) or isinstance(one, Callback)):
            built = (
                f"{one.__name__}(...)" if isinstance(one, type) else "lambda now: print(now.done)"
            )
            raise InputError(
                f"fit: callbacks hold {one!r}; give a list of callbacks or functions of"
                f" colossax.run.StepEnd, as callbacks=[{built}]"
            )


def _begun(state: TrainState, folder: RunFolder, options: RunOptions, group: Group) -> int:
    """Steps that the state had seen when the run in the folder was begun, whose batch is first."""
    here = int(state["step"])
    if not options.resume:
        return here
    return group.from_first(lambda: folder.config().get("begun", here))


def _rate(rate: Any) -> Callable[[int], Any] | None:
    return rate if rate is None or callable(rate) else lambda updates: rate
