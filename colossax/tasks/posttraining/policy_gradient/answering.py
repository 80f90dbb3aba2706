"""Answers that the model in training gives to prompts, and what each is worth."""

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from colossax.config import MeshAxis
from colossax.data.chats.prompts import Prompt
from colossax.errors import InputError
from colossax.offload import held_bytes
from colossax.processes.group import Group
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.posttraining.config import LEARNER, longest_prompt
from colossax.tasks.posttraining.policy_gradient.asked import Asked
from colossax.tasks.posttraining.rewards.answer import Answer
from colossax.tasks.posttraining.rewards.judge import Judge
from colossax.tasks.posttraining.rewards.pool import RewardWorkers
from colossax.typing import Params, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Answers, and what each is worth.

    Attributes:
        prompts: What was asked, once for each answer.
        tokens: Of each answer, what ends it included.
        logprobs: Of those as the engine said them; none where it says none.
        ended: Whether each came to its end.
        rewards: float64 `[n]`.
        failures: Answers that could not be judged, by why.
        said: Of the first of those.
        seconds: Of writing, and of rewarding.
    """

    prompts: Sequence[Prompt]
    tokens: Sequence[tuple[int, ...]]
    logprobs: Sequence[tuple[float, ...]]
    ended: Sequence[bool]
    rewards: np.ndarray
    failures: Mapping[str, int]
    said: str
    seconds: tuple[float, float]


class Answering:
    """Has the model in training answer prompts, and has that judged.

    Draws depend on the run's seed and on what each answer is told to be drawn by.

    Args:
        config: The run.
        opened: Gives the prompts, read once.
        group: The processes that train; all write and judge, a function is asked by the first one.

    Cost: a forward pass of each token that is read, and one of all seats for each token that is
    said; a cache of `seats` answers while that goes on.
    """

    def __init__(self, config: TrainConfig, opened: Callable[[], Asked], group: Group):
        self._config, self._opened, self._group = config, opened, group
        self._workers: RewardWorkers | None = None
        self._judge: Judge | None = None
        self._writer: tuple[Step, Any] | None = None
        self._beside = 0

    def start(self, step: Step, state: TrainState) -> None:
        """Load the judge, and see what lies beside the model that answers."""
        rest = {name: x for name, x in state.items() if name != "params"}
        if step.spec.model_names:
            rest["params"] = {name: x for name, x in state["params"].items() if name != LEARNER}
        held = self._group.together(lambda: self._loaded(step))
        self._beside = held_bytes((rest, held))

    def check(self, judge_step: int | None = None) -> None:
        """Refuse a function that is none, and a judge that tells no rewards.

        Args:
            judge_step: Which of a judge's checkpoints; None: the latest.

        Raises:
            InputError: That, or nothing says what answers are worth.
        """
        rollout = self._config.rollout
        if rollout.rewards is None and rollout.judge is None:
            raise InputError(
                f"rollout.rewards: {self._config.objective.name} learns from what answers are"
                " worth; name a function, as --rollout.rewards my_package.rewards:parses, or a"
                " model that tells it, with --rollout.judge"
            )
        if rollout.judge is not None:
            self._judge = Judge(rollout.judge, judge_step)
        if self._group.first and rollout.rewards is not None:
            self._begun(workers=1).close()

    @property
    def judged_at(self) -> int | None:
        """The step of the judge's checkpoint, where there is one."""
        return None if self._judge is None else self._judge.step

    def _loaded(self, step: Step) -> Any:
        """The judge's parameters, on the devices that train; None where there is no judge."""
        return None if self._judge is None else self._judge.load([*step.bound.mesh.devices.flat])

    def _begun(self, workers: int) -> RewardWorkers:
        rollout = self._config.rollout
        assert rollout.rewards is not None, "checked when the prompts were opened"
        return RewardWorkers(
            rollout.rewards,
            workers=workers,
            seconds=rollout.seconds,
            memory_gb=rollout.memory_gb,
            failed=rollout.failed,
        )

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """With processes that reward, where a function does, kept from answer to answer."""
        if not self._group.first or self._config.rollout.rewards is None:
            yield
            return
        with self._begun(self._config.rollout.workers) as self._workers:
            try:
                yield
            finally:
                self._workers = None

    def __call__(
        self,
        step: Step,
        params: Params,
        prompts: Sequence[Prompt],
        drawn_by: Callable[[int], tuple[Any, int]],
    ) -> Judged:
        """Answers of one state of the model.

        Args:
            step: Of the run.
            params: Of all its models.
            prompts: Each as often as it is to be answered.
            drawn_by: Of an answer's number, what its draws depend on.
        """
        began = time.perf_counter()
        asked = [
            self._request(step, prompt.tokens, self._seed(*drawn_by(at)))
            for at, prompt in enumerate(prompts)
        ]
        opened = self._opened()
        own = params[LEARNER] if step.spec.model_names else params
        writer = self._writing(step, own).again(own, asked)
        found = [_cut(one, opened.ends) for one in writer.run()]
        written = time.perf_counter()
        texts = [
            opened.tokenizer.decode(one.tokens[:-1] if one.ended else one.tokens) for one in found
        ]
        rewards, failures, said = self._worth(step, prompts, texts, [one.ended for one in found])
        return Judged(
            prompts=prompts,
            tokens=[one.tokens for one in found],
            logprobs=[one.logprobs for one in found],
            ended=[one.ended for one in found],
            rewards=np.asarray(rewards, np.float64),
            failures=failures,
            said=said,
            seconds=(written - began, time.perf_counter() - written),
        )

    def _worth(
        self, step: Step, prompts: Sequence[Prompt], texts: Sequence[str], ended: Sequence[bool]
    ) -> tuple[list[float], dict[str, int], str]:
        """What each answer is worth; how many could not be judged by why, and of one what is told.

        A model judges on all processes together, a function on the first, which is told what the
        model says and has the last word.
        """
        judged = None
        if self._judge is not None:
            self._loaded(step)
            judged = self._judge(prompts, texts)
        if self._config.rollout.rewards is None:
            assert judged is not None, "checked when the prompts were opened"
            worth = np.where(np.isnan(judged.values), self._config.rollout.failed, judged.values)
            return worth.tolist(), dict(judged.failures), judged.said
        numbers = [None] * len(texts) if judged is None else _or_none(judged.values)
        answers = [
            Answer(text=text, prompt=one.messages, record=one.record, judged=number, ended=whole)
            for one, text, number, whole in zip(prompts, texts, numbers, ended, strict=True)
        ]
        rewards, failures, said = self._group.from_first_in_a_run(lambda: self._rewarded(answers))
        return rewards, failures, said

    def _rewarded(self, answers: Sequence[Answer]) -> list[Any]:
        if self._workers is not None:
            found = self._workers(answers)
        else:  # a state is evaluated outside of a run
            with self._begun(self._config.rollout.workers) as workers:
                found = workers(answers)
        return [found.values.tolist(), dict(found.failures), found.said]

    def _request(self, step: Step, prompt: tuple[int, ...], seed: int) -> EngineRequest:
        temperature = self._config.policy.temperature
        # Told before any temperature, and with stages not at all.
        told = temperature == 1 and step.bound.mesh.shape[MeshAxis.STAGE] == 1
        sampling = SamplingConfig(temperature=temperature, seed=seed, logprobs=0 if told else None)
        return EngineRequest(
            prompt=prompt,
            max_tokens=self._config.rollout.max_tokens,
            ends=self._opened().ends,
            sampling=sampling,
        )

    def _seed(self, *of: Any) -> int:
        told = repr((self._config.seed, *of)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest(), "little") >> 1

    def _writing(self, step: Step, params: Params) -> Any:
        """What continues prompts, its programs made once."""
        if self._writer is None or self._writer[0] is not step:
            from colossax.inference.several import several  # what generates is loaded where it does

            data, rollout = self._config.data, self._config.rollout
            count = data.global_batch * self._config.objective.documents
            longest = [self._request(step, (0,) * longest_prompt(self._config), 0)] * count
            spec = step.spec_of(LEARNER) if step.spec.model_names else step.spec
            given = spec, step.bound, params
            eos = self._opened().tokenizer.eos
            how = {"seats": rollout.seats, "beside": self._beside}
            writer = several(*given, requests=longest, eos=eos, **how)
            self._writer = step, writer
        return self._writer[1]


def _or_none(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]


def _cut(one: Any, ends: Sequence[int]) -> Any:
    """A continuation up to what ends it: with stages only one token ended it when it was made."""
    at = next((at for at, token in enumerate(one.tokens) if token in ends), None)
    if at is None:
        return one
    return dataclasses.replace(
        one, tokens=one.tokens[: at + 1], logprobs=one.logprobs[: at + 1], ended=True
    )
