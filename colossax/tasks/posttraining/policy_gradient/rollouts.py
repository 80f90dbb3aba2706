"""Batches of answers that the model gives as it is before the steps that learn from them."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from colossax.processes.group import Group
from colossax.sharding import replicated
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.posttraining.policy_gradient.answering import Answering, Judged
from colossax.tasks.posttraining.policy_gradient.asked import Asked
from colossax.tasks.posttraining.policy_gradient.rows import row_dims, rows_of
from colossax.tasks.task import Callback
from colossax.tasks.text import Placement
from colossax.typing import Batch, TrainState

LEARNED = (
    "ratio",
    "largest_ratio",
    "clipped",
    "entropy",
    "kl_k1",
    "kl_k3",
    "value",
    "value_error",
    "return",
)
"""Of a step's metrics, what is recorded with its answers."""

OF_ENGINE = ("engine_apart", "engine_furthest")
"""Likewise, where the engine says log-probabilities."""


class Rollouts(Callback):
    """Batches of answers that the model gives as it is before the steps that learn from them.

    Answers are written when the first of those steps comes: to the prompts of that number, each
    asked as often as a group has answers. Draws depend on the run's seed, that number and the
    answer alone, so that a run which is resumed, on whatever mesh, asks and draws as one that was
    never stopped. Where several steps learn from them, what the models say of them then is asked
    once, and kept with them in checkpoints between those steps. Beside the batch's own step it is a
    callback, by which it sees the parameters.

    Args:
        config: The run.
        opened: Gives the prompts, read once.
        group: The processes that train; all write and judge, a function is asked by the first one.

    Cost: see `Answering`. Of several steps, 4 bytes per token and array on each device.
    """

    every = 1

    def __init__(self, config: TrainConfig, opened: Callable[[], Asked], group: Group):
        self._config, self._opened = config, opened
        self.answering = Answering(config, opened, group)
        self._updates = config.rollout.updates
        self._step: Step | None = None
        self._state: TrainState = {}
        self._made: Judged | None = None
        self._kept_of = self._told = -1

    def start(self, step: Step, state: TrainState) -> None:
        """The parameters that the first answers are given by."""
        self._step, self._state, self._made, self.arrays = step, state, None, None
        self._told = -1
        self.answering.start(step, state)

    def saved(self) -> Any:
        """Which answers are kept, where there are steps to come that learn from them."""
        if self.arrays is None:
            return None
        forms = {name: [[*x.shape], str(x.dtype)] for name, x in self.arrays.items()}
        return {"rollout": self._kept_of, "arrays": forms}

    def resume(self, saved: Any) -> None:
        """Say which arrays the checkpoint has of them."""
        assert self._step is not None, "`start` came before"
        if saved is None:
            return
        self._kept_of, where = saved["rollout"], replicated(self._step.bound)
        self.arrays = {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=where)
            for name, (shape, dtype) in saved["arrays"].items()
        }

    def __call__(self, now: Any) -> None:
        """Take the state after a step, and tell once of it and of the answers written for it."""
        self._state = now.state
        if now.done == self._told:
            return
        self._told = now.done
        if now.done % self._updates == 0:
            self.arrays = None
        known = now.metrics
        learned = {name: known[name] for name in LEARNED if name in known}
        judged, self._made = self._made, None
        if judged is None:
            now.log(learned)
            return
        if any(judged.logprobs):
            learned |= {name: known[name] for name in OF_ENGINE}
        now.log({**told_of(judged, self._config.rollout.group), **learned})
        if judged.failures:
            count = sum(judged.failures.values())
            now.note(
                f"step {now.done}: {count} of {len(judged.rewards)} answers could not be"
                f" judged ({judged.said})"
            )

    @contextlib.contextmanager
    def batches(self, step: Step, start: int) -> Iterator[Iterator[Batch]]:
        """Global batches from number `start` on, each made when it is asked for."""
        place = Placement(step, self._config.data.global_batch, row_dims(self._config))

        def made() -> Iterator[Batch]:
            for number in itertools.count(start):
                if self._updates == 1:
                    yield place(rows_of(self._config, self._written(step, number), place.wanted))
                    continue
                if self.arrays is None or self._kept_of != number // self._updates:
                    self._keep(step, number, place)
                yield place(self._kept_rows(number, place))

        with self.answering.working():
            yield made()

    def _written(self, step: Step, number: int) -> Judged:
        """Answers for step `number`, and for those that learn from them too."""
        rollout, group = number // self._updates, self._config.rollout.group
        count = self._config.rollout.batches * self._prompts_of_step
        prompts = self._opened().asked(rollout * count, count)
        each = [prompt for prompt in prompts for _ in range(group)]
        assert self._state, "a run calls `start` before it asks for batches"
        params = self._state["params"]
        self._made = self.answering(step, params, each, lambda at: (rollout, at))
        return self._made

    def _keep(self, step: Step, number: int, place: Placement) -> None:
        """Write answers, and ask the models of this state what they say of them."""
        self.arrays = None
        judged, size = self._written(step, number), self._config.data.global_batch
        found = []
        for batch in range(self._config.rollout.batches):
            rows = rows_of(self._config, judged, range(batch * size, (batch + 1) * size))
            local = {name: x[[*place.wanted]] for name, x in rows.items()}
            said = step.prepare(self._state, place(local))
            found.append({**rows, **{name: np.asarray(x) for name, x in said.items()}})
        where = replicated(step.bound)
        whole = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        self.arrays = {
            name: jax.make_array_from_callback(x.shape, where, lambda index, x=x: x[index])
            for name, x in whole.items()
        }
        self._kept_of = number // self._updates

    def _kept_rows(self, number: int, place: Placement) -> Batch:
        """Of the answers that are kept, the rows of a step that this process holds."""
        assert self.arrays is not None, "written before"
        size = self._config.data.global_batch
        first = number % self._updates % self._config.rollout.batches * size
        wanted = [first + row for row in place.wanted]
        return {name: np.asarray(x)[wanted] for name, x in self.arrays.items()}

    def validated(self, step: Step, state: TrainState) -> Judged:
        """One answer to each held-out prompt, as many as `validation_batches` have."""
        count = self._config.data.validation_batches * self._prompts_of_step
        numbers = self._opened().held_out[:count]
        prompts = [self._opened().prompts[number] for number in numbers]
        return self.answering(step, state["params"], prompts, lambda at: ("held out", at))

    @property
    def _prompts_of_step(self) -> int:
        data, objective = self._config.data, self._config.objective
        return data.global_batch * objective.documents // self._config.rollout.group


def told_of(judged: Judged, group: int) -> dict[str, float]:
    """What is recorded of the answers of a step.

    Args:
        judged: The answers, those to one prompt together.
        group: How many those are.
    """
    lengths = np.asarray([len(one) for one in judged.tokens])
    rewards = judged.rewards.reshape(-1, group)
    writing, rewarding = judged.seconds
    alike = float((rewards.min(axis=1) == rewards.max(axis=1)).mean())
    return {
        "reward": float(rewards.mean()),
        "reward_spread": float(rewards.std()),
        **({"groups_alike": alike} if group > 1 else {}),
        "answer_tokens": float(lengths.mean()),
        "truncated": 1 - float(np.mean(judged.ended)),
        "not_judged": float(sum(judged.failures.values())),
        "written_per_s": float(lengths.sum()) / writing,
        "writing_seconds": writing,
        "rewarding_seconds": rewarding,
    }
