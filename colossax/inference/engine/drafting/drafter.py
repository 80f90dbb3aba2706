"""What an engine asks of whoever drafts for it."""

import abc
import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int

from colossax.config import BoundPlan
from colossax.inference.engine.sampling import Draws
from colossax.nn import FlatTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The model that is drafted for, behind a step.

    Attributes:
        params: Its parameters.
        cache: Its pages, with all tokens of the step.
    """

    params: Any
    cache: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """All seats behind a step, as whoever drafts the next tokens sees them.

    Attributes:
        said: Tokens of each seat by position, `[r, slots + 1]` int32.
        length: How many of them there are, `[r]` int32; those behind mean nothing.
        seen: How many of them are in the model's cache, `[r]` int32: but for the last one all that
            it has said itself.
        speaks: Which seats are to be drafted for, `[r]` bool.
        room: Tokens that the pages of each seat hold, `[r]` int32.
        table: Pages of each seat.
        draws: What its request asks.
        mask, masked: See `choose`.
        target: The model.
    """

    said: Any
    length: Any
    seen: Any
    speaks: Any
    room: Any
    table: Any
    draws: Draws
    mask: Any
    masked: Any
    target: Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guesses:
    """What may come behind the last token of each seat.

    Attributes:
        tokens: `[r, d]` int32.
        parent: Of a tree, which of the guesses each follows, a smaller number than its own, which
            counts from 1; 0 is the last token itself; `[r, d]` int32. None: the one before it.
    """

    tokens: Any
    parent: Any = None


class Drafter(abc.ABC):
    """Guesses what seats say next; pure functions of what is on the devices.

    No guess changes a token: the model draws each as if there were none, and a guess that equals
    the draw saves a step. A guess that is drawn with the same key is right more often.

    Attributes:
        tokens: How many it guesses for each seat.
        tree: Whether several of them may be for one place; else each follows the one before it.
        params: What its functions get; kept.
    """

    tokens: int
    tree: bool = False
    params: Any = None

    @abc.abstractmethod
    def fitted(self, program: Any) -> "Drafter":
        """One that drafts for this program, whose sizes and layout are known.

        Raises:
            InputError: It cannot draft for the model.
        """

    def checked_by_another(self) -> "Drafter":
        """One whose guesses another drafter looks at, before the model does."""
        return self

    def on(self, bound: BoundPlan) -> "Drafter":
        """One that drafts on some of the devices, for an engine of those."""
        return self

    @property
    def shardings(self) -> Any:
        """Of what it holds between steps."""
        return None

    @property
    def abstract(self) -> Any:
        """Shapes, dtypes and shardings of it."""
        return None

    def empty(self) -> Any:
        """What it holds before the first step."""
        return None

    def read(
        self, params: Any, held: Any, target: Target, ids: Int[Array, " t"], flat: FlatTokens
    ) -> Any:
        """What it holds after a step's tokens, where prompts are among them."""
        return held

    @abc.abstractmethod
    def draft(self, params: Any, held: Any, view: View) -> tuple[Guesses, Any]:
        """Tokens behind each seat's last one, and what it holds then."""
