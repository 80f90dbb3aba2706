"""What a reward function is given."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that a model gave.

    Attributes:
        text: What it says.
        prompt: What was asked: messages with `role` and `content`.
        record: Fields of the line that the prompt is from, such as the right answer.
        judged: What a judge says that it is worth (`rollout.judge`); None: there is none, or it
            could not read this answer.
        ended: Whether it came to its end; False: it was cut off at the most tokens it may have.
    """

    text: str
    prompt: tuple[dict[str, Any], ...] = ()
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    judged: float | None = None
    ended: bool = True
