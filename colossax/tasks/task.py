"""What a run trains, without saying what it is."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import jax

from colossax.config import Plan, to_json
from colossax.errors import InputError
from colossax.nn import GivenDims, MakeModels
from colossax.optim import Optimizer
from colossax.step.loss import Loss
from colossax.step.options import StepOptions
from colossax.step.step import Step
from colossax.typing import Batch, Params, TrainState

Batches = Callable[[Step, int], AbstractContextManager[Iterator[Batch]]]
"""`(step, start)`: a context that gives endless global batches from number `start` on."""


@runtime_checkable
class ResumableBatches(Protocol):
    """Batches that can begin at any number."""

    def batches(self, start_step: int, /) -> Iterable[Batch]:
        """Global batches from number `start_step` on, counted from 0."""
        ...


Evaluator = Callable[[Step, TrainState], Mapping[str, Any]]
"""`(step, state) -> {metric: number}`, on every process alike."""

TAKEN = frozenset(
    {
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "tokens_per_s",
        "mfu",
        "learning_rate",
        "step_seconds",
        "data_seconds",
        "device_bytes",
        "host_bytes",
    }
)
"""What a run records by itself; no metric of an evaluator has these names."""


class Callback:
    """Called by a run between its steps; a subclass says what it does there.

    It is called on every process alike and must decide alike. A plain function of `StepEnd` does
    where nothing is remembered: it is called once after every step.

    Attributes:
        every: Steps between calls. It is called with each evaluation too, and with 0 then alone.
            Where a run ends before its last step, as its batches or a callback do, its state is
            evaluated after the step's call: with that comes a second call of the same `done`.
            What it reads of `metrics` makes the device wait for Python.
        arrays: What checkpoints keep for it, or None: a tree like the parameters, or arrays of JAX
            by name, of any shapes and places. A run that goes on puts them there after `resume`,
            each in the place of the one that is there then, which may be a `jax.ShapeDtypeStruct`.
    """

    every: int = 0
    arrays: Params | None = None

    def start(self, step: Step, state: TrainState) -> None:
        """A run begins, fresh or resumed, with this state: forget what an earlier one left."""

    def __call__(self, now: Any) -> None:
        """Look and act; `now` is a `colossax.run.StepEnd`."""
        raise NotImplementedError

    def saved(self) -> Any:
        """What a checkpoint keeps of it, as JSON."""
        return None

    def resume(self, saved: Any) -> None:
        """Go on from what `saved` gave; `start` came before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: a model, its loss, batches, and what is said of a state beside its loss.

    A run asks for nothing of the data before model, plan and devices are known to fit: what takes
    long to read may be read when `identity` is first called, which every process does alike.

    Attributes:
        name: For folders, titles and people.
        make_model: See `boost`.
        optimizer: See `boost`.
        loss: See `boost`.
        shapes: Of a global batch's arrays.
        batches: From any number on, the same whenever they are asked for; see `Batches`. What is no
            function, as a Grain data set or an object with `batches(start_step)`, is taken as `fit`
            takes it.
        evaluators: Of a state, by name; their metrics are recorded, shown and drawn.
        judged: From the run's state, the one that is evaluated, and whose parameters complete:
            `optim.averaged`, where an optimizer's averages are meant.
        callbacks: Called between steps, in this order; each a `Callback` or a function.
        learning_rate: Of the optimizer after so many updates, to be recorded.
        tokens: What a full global batch weighs: the step's metric of that name. 0: not known.
        counted: What those are, for people.
        flops: Of the model for such a batch, forward and backward; recomputation is not counted.
            0: not known, and no MFU is told.
        flops_formula: How they are counted, for people.
        options: Of the step beside its batch's shapes and its disk.
        dims: Names of parameters' dims; see `boost`.
        unit: Of the loss, or of what is drawn instead, for people.
        drawn: Metrics of the picture in place of the loss and all there are; the first is one that
            a callback logs of steps.
        baselines: Numbers to hold metrics against, drawn as lines and part of the final record.
        identity: What decides the losses step by step, as JSON: a run is not resumed as another.
        documents: JSON values stored in each checkpoint beside `run`, `plan` and `position`.
        asked: How the run was asked for, as JSON, with the plan that runs.
        introduction: Lines for people before training.
        conclusion: Lines for people about the final record of a run that was not stopped.
        complete: Something that the trained model makes, for people; called on every process.
    """

    name: str
    make_model: MakeModels
    optimizer: Optimizer
    loss: Loss
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    batches: Batches | ResumableBatches | Iterable[Batch]
    evaluators: Mapping[str, Evaluator] = dataclasses.field(default_factory=dict)
    judged: Callable[[TrainState], TrainState] = lambda state: state
    callbacks: Sequence[Callable[[Any], None]] = ()
    learning_rate: Callable[[int], Any] | None = None
    tokens: int
    flops: int
    counted: str = "tokens"
    flops_formula: str = ""
    options: StepOptions = StepOptions()
    dims: GivenDims | None = None
    unit: str = ""
    drawn: Sequence[str] = ()
    baselines: Callable[[], Mapping[str, float]] = dict
    identity: Callable[[], dict[str, Any]] = dict
    documents: Callable[[], dict[str, Any]] = dict
    asked: Callable[[Plan], dict[str, Any]] = lambda plan: {"plan": to_json(plan)}
    introduction: Callable[[], Sequence[str]] = tuple
    conclusion: Callable[[Mapping[str, Any]], Sequence[str]] = lambda final: ()
    complete: Callable[[Step, Params], str | None] | None = None

    def evaluated(self, step: Step, state: TrainState) -> dict[str, float]:
        """The metrics of all evaluators.

        Raises:
            InputError: Two metrics have one name, or one has a name that a run records itself.
        """
        all_metrics: dict[str, float] = {}
        for name, evaluate in self.evaluators.items():
            metrics = {metric: float(value) for metric, value in evaluate(step, state).items()}
            clash = sorted((all_metrics.keys() | TAKEN) & metrics.keys())
            if clash:
                raise InputError(
                    f"evaluator '{name}': gives a metric '{clash[0]}', which there is already; give"
                    " it a name of its own"
                )
            all_metrics |= metrics
        return all_metrics
