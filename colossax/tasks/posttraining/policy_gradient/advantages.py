"""How much better an answer, or a token of it, was than what was to be expected; on the host."""

import numpy as np

from colossax.config import at_least, within
from colossax.errors import InputError

_LEAST = 1e-4
"""Added to a spread, as GRPO's authors do."""


def group_advantages(rewards: np.ndarray, groups: np.ndarray, *, scaled: bool = True) -> np.ndarray:
    """`(r - mean) / (std + 1e-4)` of each reward among those of its group.

    Args:
        rewards: `[n]`, of answers.
        groups: `[n]` int, which answers are to the same prompt.
        scaled: Whether by the spread (GRPO), of n - 1; Dr. GRPO leaves it out.

    Returns:
        float64 `[n]`.

    Raises:
        InputError: A group has one answer, or a reward is not finite; names it. Or lengths differ.

    Source: Shao et al. 2024, DeepSeekMath; Liu et al. 2025.
    """
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise InputError(
            f"groups: rewards have shape {list(rewards.shape)} and groups {list(groups.shape)};"
            " give one of each for every answer"
        )
    if not np.isfinite(rewards).all():
        at = int(np.argmin(np.isfinite(rewards)))
        raise InputError(
            f"rewards: that of answer {at} is {rewards[at]}; give a finite number for each"
        )
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = groups == group
        if own.sum() < 2:
            raise InputError(
                f"groups: {group} has one answer, which nothing is there to compare with; draw two"
                " or more to each prompt"
            )
        centred = rewards[own] - rewards[own].mean()
        found[own] = centred / (rewards[own].std(ddof=1) + _LEAST) if scaled else centred
    return found


def gae(
    rewards: np.ndarray, values: np.ndarray, *, discount: float = 1.0, decay: float = 0.95
) -> np.ndarray:
    """Generalised advantages of the tokens of one answer.

    `d_t = r_t + discount V_{t+1} - V_t`, `A_t = d_t + discount decay A_{t+1}`; behind the last
    token both are 0, as an answer has ended. Returns, which a critic learns, are `A + V`.

    Args:
        rewards: `[t]`, of tokens: an answer's reward is that of its last one.
        values: `[t]`, what a critic expected before each token.
        discount: gamma, 0 to 1.
        decay: lambda, 0 to 1.

    Returns:
        float64 `[t]`.

    Raises:
        InputError: Lengths differ, or a number is out of its range.

    Source: Schulman et al. 2015, High-Dimensional Continuous Control Using Generalized Advantage
    Estimation.
    """
    for name, value in (("discount", discount), ("decay", decay)):
        within(0, 1).check(value, f"gae: {name}")
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise InputError(
            f"gae: rewards have shape {list(rewards.shape)} and values {list(values.shape)}; give"
            " one of each for every token of an answer"
        )
    found, behind, value_behind = np.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        behind = rewards[t] + discount * value_behind - values[t] + discount * decay * behind
        found[t], value_behind = behind, values[t]
    return found


def whitened(advantages: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Less their mean, over their spread, of the tokens that count; 0 elsewhere.

    Args:
        advantages: Of tokens, any shape.
        weights: Of the same shape, 1 for those that count.

    Raises:
        InputError: None counts.
    """
    at_least(1).check(float(np.sum(weights)), "whitened: tokens that count")
    own = np.asarray(advantages, np.float64)[np.asarray(weights) > 0]
    spread = (np.asarray(advantages, np.float64) - own.mean()) / (own.std() + 1e-8)
    return np.where(np.asarray(weights) > 0, spread, 0.0)
