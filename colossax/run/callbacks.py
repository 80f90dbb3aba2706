"""Callbacks that come with the library, and examples of how short one is."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from colossax.errors import InputError
from colossax.run.around import check_apart
from colossax.run.calling import StepEnd
from colossax.step.step import Step
from colossax.tasks import Callback
from colossax.typing import TrainState


class _Best(Callback):
    """Remembers the best value of a metric; less is better, unless `larger`."""

    def __init__(self, metric: str, *, larger: bool = False):
        self._metric, self._larger = metric, larger
        self.best: float | None = None

    def start(self, step: Step, state: TrainState) -> None:
        """Forget an earlier run."""
        self.best = None

    def improved(self, now: StepEnd, least: float = 0.0) -> bool:
        """Whether this is the best by more than `least`; then it is remembered."""
        if self._metric not in now.evaluated:
            raise InputError(
                f"{type(self).__name__}: no evaluator gives a metric '{self._metric}', only"
                f" {', '.join(sorted(now.evaluated))}"
            )
        value, best = now.evaluated[self._metric], self.best
        gain = math.inf if best is None else (value - best if self._larger else best - value)
        if math.isnan(value) or not gain > least:
            return False
        self.best = value
        return True


class EarlyStopping(_Best):
    """Ends a run when a metric of its evaluators has not improved `patience` times in a row."""

    def __init__(self, metric: str, *, patience: int = 3, least: float = 0.0, larger: bool = False):
        """Choose the metric, and by how much (`least`) it has to improve to count."""
        super().__init__(metric, larger=larger)
        self._patience, self._least, self._in_vain = patience, least, 0

    def start(self, step: Step, state: TrainState) -> None:
        """Forget an earlier run."""
        self.best, self._in_vain = None, 0

    def __call__(self, now: StepEnd) -> None:
        """Count, and end the run."""
        if now.evaluated:
            self._in_vain = 0 if self.improved(now, self._least) else self._in_vain + 1
        if self._in_vain >= self._patience:
            now.stop(f"{self._metric} has not improved in {self._in_vain} evaluations")

    def saved(self) -> Any:
        """Best value, evaluations since."""
        return [self.best, self._in_vain]

    def resume(self, saved: Any) -> None:
        """Count on."""
        self.best, self._in_vain = saved


class BestCheckpoint(_Best):
    """Keeps the best state by a metric of the run's evaluators in `<out>/<folder>`."""

    def __init__(self, metric: str, *, larger: bool = False, folder: str = "best"):
        """Choose the metric and the folder.

        Raises:
            InputError: The folder is a path, or a name that the run itself uses.
        """
        check_apart(folder)
        super().__init__(metric, larger=larger)
        self._folder = folder

    def __call__(self, now: StepEnd) -> None:
        """Save where it is better than all before."""
        if now.evaluated and self.improved(now):
            now.save(self._folder)

    def saved(self) -> Any:
        """Best value."""
        return self.best

    def resume(self, saved: Any) -> None:
        """Go on comparing."""
        self.best = saved


class AverageEvaluation(Callback):
    """Evaluates an exponential mean of the parameters too: each metric again, as `average_...`.

    The decay is `min(decay, (1 + n) / (10 + n))` at step n. Holds float32 parameters once more.
    """

    every = 1

    def __init__(self, decay: float = 0.999):
        """Choose the decay a step."""
        self._decay = decay

    def start(self, step: Step, state: TrainState) -> None:
        """Begin with the parameters as they are."""
        self.arrays, self._mixed_at = jax.tree.map(_float32_copy, state["params"]), 0
        places = jax.tree.map(lambda leaf: leaf.sharding, self.arrays)
        self._mix = jax.jit(_mixed, donate_argnums=0, out_shardings=places)

    def __call__(self, now: StepEnd) -> None:
        """Average; where the run is evaluated, evaluate the mean too."""
        if now.done != self._mixed_at:
            decay = min(self._decay, (1 + now.done) / (10 + now.done))
            self.arrays = self._mix(self.arrays, now.state["params"], decay)
            self._mixed_at = now.done
        if now.evaluated:
            like = now.state["params"]
            params = jax.tree.map(lambda mean, p: mean.astype(p.dtype), self.arrays, like)
            metrics = now.evaluate({**now.state, "params": params})
            now.log({f"average_{name}": value for name, value in metrics.items()})


def _float32_copy(leaf: jax.Array) -> jax.Array:
    if leaf.sharding.memory_kind == "pinned_host":
        raise InputError(
            "AverageEvaluation: parameters lie in host memory, and their mean has no room on the"
            " device; leave it out, or give plan.offload.parameters 0"
        )
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.array(leaf, jnp.float32 if floats else leaf.dtype, copy=True)


def _mixed(mean: Any, params: Any, decay: jax.Array) -> Any:
    def mix(a: jax.Array, p: jax.Array) -> jax.Array:
        floats = jnp.issubdtype(p.dtype, jnp.floating)
        return a + (1 - decay) * (p.astype(a.dtype) - a) if floats else p

    return jax.tree.map(mix, mean, params)
