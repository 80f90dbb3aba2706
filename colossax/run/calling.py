"""What a run calls between its steps, and what that may see and do."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.checkpoint import ArraySlot, slot_of
from colossax.errors import InputError
from colossax.run.checkpointing import RunCheckpoints
from colossax.run.hyperparameters import with_hyperparameter
from colossax.step.saving.records import MODEL, plain_slots
from colossax.step.step import Step
from colossax.tasks import TAKEN, Callback
from colossax.typing import Metrics, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What a callback's wishes end in.

    Attributes:
        evaluate: Metrics of a state by all evaluators.
        record: Takes numbers of a step for files and trackers.
        note: Tells a person.
        save: Starts saving `(state, done, folder)` below the run's folder.
    """

    evaluate: Callable[[TrainState], Mapping[str, float]]
    record: Callable[[dict[str, Any]], None]
    note: Callable[[str], None]
    save: Callable[[TrainState, int, str], None]


class StepEnd:
    """A run between two steps, as a callback sees it.

    Attributes:
        done: Steps done, the last one included.
        steps: Of the whole run.
        step: The step, with the model's spec, the bound plan and `evaluate`.
        state: After the step. The next step gives it up: copy what is to be kept. A state of the
            same shapes and places that is put here is the one that training goes on with.
        evaluated: Metrics of this state by name, what callbacks before logged included; empty
            where it was not evaluated.
    """

    def __init__(
        self,
        *,
        done: int,
        steps: int,
        step: Step,
        state: TrainState,
        metrics: Metrics,
        evaluated: Mapping[str, float],
        tools: Tools,
    ):
        self.done, self.steps, self.step, self.state = done, steps, step, state
        self.evaluated: dict[str, float] = dict(evaluated)
        self.ended: str | None = None
        self._metrics, self._tools = metrics, tools

    @property
    def metrics(self) -> dict[str, Any]:
        """The step's metrics as numbers, `loss` among them; waits for the device."""
        return {name: value.tolist() for name, value in jax.device_get(self._metrics).items()}

    def evaluate(self, state: TrainState) -> Mapping[str, float]:
        """What the run's evaluators say of a state."""
        return self._tools.evaluate(state)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Record numbers of this step, by name, for files, trackers and the picture.

        A scalar of JAX or NumPy is a number too; that of JAX makes Python wait for the device.

        Raises:
            InputError: A name is one that the run itself or an evaluator uses, or a value is no
                number.
        """
        clash = sorted((TAKEN | self.evaluated.keys()) & numbers.keys())
        if clash:
            raise InputError(
                f"callback: logs '{clash[0]}', which there is already; give it another name"
            )
        floats = {name: _number(name, value) for name, value in numbers.items()}
        self._tools.record({"step": self.done, **floats})
        if self.evaluated:
            self.evaluated |= floats

    def note(self, text: str) -> None:
        """Tell a person, on standard error."""
        self._tools.note(text)

    def save(self, folder: str) -> None:
        """Save this state as the one checkpoint of a folder below the run's.

        Raises:
            InputError: The folder is a path, or a name that the run itself uses.
        """
        self._tools.save(self.state, self.done, folder)

    def stop(self, why: str) -> None:
        """End the run after this step; it is evaluated and saved, and not gone on with."""
        self.ended = why

    def set_hyperparameter(self, name: str, value: float) -> None:
        """Change a number of an optimizer made by `optax.inject_hyperparams`.

        Raises:
            InputError: It has none of that name, or a schedule decides it.
        """
        opt_state = with_hyperparameter(self.state["opt_state"], name, value)
        self.state = {**self.state, "opt_state": opt_state}


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(
            f"callback: logs '{name}', which is no number but of type {type(value).__name__}, shape"
            f" {getattr(value, 'shape', ())}; give a number, as by float(...)"
        ) from problem


class _Function(Callback):
    """A plain function as a callback, called once after every step."""

    every = 1

    def __init__(self, function: Callable[[StepEnd], None]):
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self._called_at: int | None = None

    def __call__(self, now: StepEnd) -> None:
        if now.done != self._called_at:
            self._called_at = now.done
            self._function(now)


class Callbacks:
    """The callbacks of a run, with what checkpoints keep of them."""

    def __init__(self, callbacks: Sequence[Any], step: Step, steps: int, tools: Tools):
        """Give names: that of the class or function, numbered from the second of a name on."""
        self._step, self._steps, self._tools = step, steps, tools
        self._named: dict[str, Callback] = {}
        for one in callbacks:
            callback = one if isinstance(one, Callback) else _Function(one)
            number = 1
            base = callback.name if isinstance(callback, _Function) else type(callback).__name__
            while (name := base if number == 1 else f"{base}_{number}") in self._named:
                number += 1
            self._named[name] = callback
        self.ended: dict[str, str] | None = None
        """Which callback ended the run, and why."""

    def start(self, state: TrainState) -> None:
        """Have all begin; before `resume`."""
        for name, callback in self._named.items():
            callback.start(self._step, state)
            _check_arrays(name, callback)

    def resume(self, checkpoints: RunCheckpoints, done: int) -> None:
        """Give all what a checkpoint has of them; one that it lacks has begun anew.

        Functions remember nothing.
        """
        kept = checkpoints.document(done, "callbacks") or {"states": {}, "ended": None}
        for name, callback in self._named.items():
            if isinstance(callback, _Function):
                continue
            if name not in kept["states"]:
                self._tools.note(f"the checkpoint has nothing of {name}, which begins anew")
                continue
            callback.resume(kept["states"][name])
            wants = [(slot, leaf.sharding) for slot, leaf in self._arrays(name, callback)]
            if wants:
                arrays = checkpoints.arrays(done, wants)
                structure = jax.tree.structure(callback.arrays)
                callback.arrays = jax.tree.unflatten(structure, arrays)
        if kept["ended"] is not None and kept["ended"]["by"] in self._named:
            self.ended = kept["ended"]

    def kept(self) -> tuple[dict[str, Any], list[tuple[ArraySlot, jax.Array]]]:
        """Documents and arrays for a checkpoint."""
        if not self._named:
            return {}, []
        states = {
            name: callback.saved()
            for name, callback in self._named.items()
            if not isinstance(callback, _Function)
        }
        pairs = [pair for item in self._named.items() for pair in self._arrays(*item)]
        return {"callbacks": {"states": states, "ended": self.ended}}, pairs

    def __call__(
        self, state: TrainState, done: int, metrics: Metrics, evaluated: Mapping[str, float]
    ) -> tuple[TrainState, Mapping[str, float]]:
        """Call those whose turn it is; gives the state to go on with, and what is known of it."""
        for name, callback in self._named.items():
            if not evaluated and not (callback.every and done % callback.every == 0):
                continue
            now = StepEnd(
                done=done,
                steps=self._steps,
                step=self._step,
                state=state,
                metrics=metrics,
                evaluated=evaluated,
                tools=self._tools,
            )
            callback(now)
            state, evaluated = now.state, now.evaluated
            if now.ended is not None and self.ended is None:
                self.ended = {"by": name, "why": now.ended}
        return state, evaluated

    def _arrays(self, name: str, callback: Callback) -> list[tuple[ArraySlot, Any]]:
        if callback.arrays is None:
            return []
        _check_arrays(name, callback)
        kind, infos = f"callback_{name}", self._step.spec.infos
        if not _alike(callback.arrays, infos):
            slots = plain_slots(callback.arrays, f"{MODEL}/{kind}")
        else:
            slots = jax.tree.map(
                lambda info, leaf: slot_of(
                    info, f"{info.model or MODEL}/{kind}", dtype=np.dtype(leaf.dtype)
                ),
                infos,
                callback.arrays,
            )
        return list(zip(jax.tree.leaves(slots), jax.tree.leaves(callback.arrays), strict=True))


def _check_arrays(name: str, callback: Callback) -> None:
    """Refuse arrays that no checkpoint can keep.

    Raises:
        InputError: One is none of JAX.
    """
    for leaf in jax.tree.leaves(callback.arrays):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise InputError(
                f"callback '{name}': its arrays hold a {type(leaf).__name__}, and checkpoints keep"
                " arrays of JAX; give jax.device_put(x, a sharding of the mesh)"
            )


def _alike(arrays: Any, infos: Any) -> bool:
    """Whether these are of parameters, one of each and of its shape."""
    if jax.tree.structure(arrays) != jax.tree.structure(infos):
        return False
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(infos), strict=True)
    return all(array.shape == info.shape for array, info in pairs)
