"""Rows of a batch made of answers that were judged."""

import itertools
from collections.abc import Sequence

import numpy as np

from colossax.data.chats.rows import filled_row
from colossax.data.loader import LocalBatch
from colossax.tasks.config import TrainConfig
from colossax.tasks.posttraining.answers import REFERENCE_LOGPS
from colossax.tasks.posttraining.policy_gradient.advantages import group_advantages
from colossax.tasks.posttraining.policy_gradient.answering import Judged
from colossax.tasks.posttraining.policy_gradient.critic import OLD_VALUES, RETURNS, REWARDS
from colossax.tasks.posttraining.policy_gradient.loss import (
    ADVANTAGES,
    ENGINE_LOGPS,
    NOT_SAID,
    OLD_LOGPS,
)
from colossax.typing import TOKEN_DIMS, Dims


def given_numbers(config: TrainConfig) -> tuple[str, ...]:
    """Names of a row's numbers, which are there before a step is made of it."""
    ppo = config.objective.name == "ppo"
    if config.rollout.updates == 1:  # prepared in the step
        return (REWARDS if ppo else ADVANTAGES, ENGINE_LOGPS)
    of_critic = (REWARDS, OLD_VALUES, RETURNS) if ppo else ()
    of_reference = (REFERENCE_LOGPS,) if config.policy.divergence else ()
    return (*of_critic, ADVANTAGES, ENGINE_LOGPS, OLD_LOGPS, *of_reference)


def row_dims(config: TrainConfig) -> dict[str, Dims]:
    """Dims of all arrays that rows of rewarded answers have."""
    return {**TOKEN_DIMS, **dict.fromkeys(given_numbers(config), ("batch", "seq"))}


def rows_of(config: TrainConfig, judged: Judged, wanted: Sequence[int]) -> LocalBatch:
    """These rows, of as many answers each, without what models say of them.

    Args:
        config: Of the run.
        judged: The answers, of all rows.
        wanted: Numbers of rows.
    """
    rollout, documents = config.rollout, config.objective.documents
    ppo, numbers = config.objective.name == "ppo", judged.rewards
    if not ppo:  # a critic makes advantages of rewards in the step
        groups = np.arange(len(numbers)) // rollout.group
        numbers = group_advantages(numbers, groups, scaled=rollout.scaled)

    def made(own: range) -> LocalBatch:
        pairs = []
        for at in own:
            tokens = np.asarray([*judged.prompts[at].tokens, *judged.tokens[at]], np.int32)
            pairs.append((tokens, np.arange(len(tokens)) >= len(judged.prompts[at].tokens)))
        row = filled_row(pairs, config.data.seq_len)
        told = row["weights"] > 0
        each = np.where(told, numbers[own.start :][row["segments"]], 0.0)
        if ppo:  # an answer's reward is that of its last token
            each[:-1][told[1:] & (row["segments"][1:] == row["segments"][:-1])] = 0.0
        row[REWARDS if ppo else ADVANTAGES] = each.astype(np.float32)
        row[ENGINE_LOGPS] = np.full(len(told), NOT_SAID, np.float32)
        if any(judged.logprobs[at] for at in own):
            said = (judged.logprobs[at] for at in own)
            row[ENGINE_LOGPS][told] = [*itertools.chain.from_iterable(said)]
        return row

    rows = [made(range(row * documents, (row + 1) * documents)) for row in wanted]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
