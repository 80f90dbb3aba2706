"""An embedder: texts in, a vector of each out, read together by one compiled step."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.embedding.program import TOKENS, EmbeddingProgram
from colossax.inference.engine.engine import DEPTH
from colossax.inference.engine.parts import check_served
from colossax.nn import ModelSpec
from colossax.scheduling import check_tokens
from colossax.scheduling.texts import TextPlan, TextQueue
from colossax.typing import Params

NOT_SOUND = "the model gave numbers that are none (NaN or infinite) for this text"


class Embedded(NamedTuple):
    """A text that has been read.

    Attributes:
        number: Of the text, as `add` gave it.
        vector: `[width]` float32; None where the model gave no numbers.
        message: Why not.
    """

    number: int
    vector: np.ndarray | None
    message: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderStats:
    """What an embedder has done and holds.

    Attributes:
        steps: Run, by the size of their rows.
        tokens: Of all texts that were read.
        places: For tokens in all steps; what exceeds `tokens` was filled up.
        waiting: Texts that are in no step yet.
        reading: Texts of steps that are under way.
    """

    steps: Mapping[int, int]
    tokens: int
    places: int
    waiting: int
    reading: int


class Embedder:
    """Many texts at once, each as if it were alone.

    Texts lie one behind another in rows of a fixed length, and a token attends to those of its own
    text: so work is that of real tokens, whatever the lengths of those that are read together.
    What a text's vector is, the model's head says, see `HeadConfig`: a hidden state, a reward,
    logits of classes.

    It belongs to one thread. Nothing is compiled after `warm`.

    Attributes:
        began: Is told which texts are in a step, just before it.

    Cost: a step reads weights once. No cache: memory is the parameters and one step's activations.
    tests/inference/test_embedding.py counts FLOPs and filled places.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        *,
        tokens: int = TOKENS,
        longest: int | None = None,
    ):
        """Prepare the steps; nothing is compiled yet.

        Args:
            spec: The model, as `describe` gave it under `bound`; its head pools.
            bound: Where the parameters live. Where the plan splits batches, each part has rows of
                its own.
            params: Laid out by `bound`; kept.
            tokens: Of a row where many texts wait. Few are read in shorter rows, and a text that
                is longer than this in one as long as the longest.
            longest: Text that is read, in tokens; default the model's `max_seq`.

        Raises:
            InputError: The model tells no embeddings, or a size is none.
            PlanError: Layers are in stages.
        """
        check_served(spec, bound)
        self.program = EmbeddingProgram(spec, bound, tokens=tokens, longest=longest)
        self._params = params
        self._queue = TextQueue(
            sizes=self.program.sizes,
            usual=self.program.usual,
            rows=self.program.rows,
            most=tuple(self.program.documents.values()),
        )
        self._texts: dict[int, tuple[int, ...]] = {}
        self._flying: deque[tuple[TextPlan, Any]] = deque()
        self._numbers = itertools.count()
        self._steps = dict.fromkeys(self.program.sizes, 0)
        self._tokens = self._places = 0
        self.began: Callable[[list[int]], None] = lambda _numbers: None

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.program.width

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is read."""
        return self.program.longest

    @property
    def busy(self) -> bool:
        """Whether any text has not been read."""
        return bool(self._flying or len(self._queue))

    @property
    def stats(self) -> EmbedderStats:
        """See there."""
        return EmbedderStats(
            steps=dict(self._steps),
            tokens=self._tokens,
            places=self._places,
            waiting=len(self._queue),
            reading=sum(len(plan.numbers) for plan, _ in self._flying),
        )

    def add(self, text: Sequence[int]) -> int:
        """Let a text wait for a step; its number.

        Args:
            text: Token ids, with those that the model wants around it: `Tokenizer.encode_framed`.

        Raises:
            InputError: It is empty, too long, or has ids that the model does not know.
        """
        self._check(text, "text")
        number = next(self._numbers)
        self._texts[number] = tuple(text)
        self._queue.add(number, len(text))
        return number

    def cancel(self, number: int) -> None:
        """Nobody wants this one any more; nothing is told of it."""
        self._texts.pop(number, None)
        self._queue.cancel(number)

    def warm(self) -> None:
        """Compile all there is to compile, by steps of nothing."""
        for size in self.program.sizes:
            jax.block_until_ready(self.program(self._params, self.program.packed(size, ())))

    def step(self) -> list[Embedded]:
        """Send steps on their way, and give what the oldest gave; empty where nothing is to do."""
        while len(self._flying) < DEPTH and (plan := self._queue.next()) is not None:
            self.began(plan.numbers)
            rows = [[self._texts[number] for number in row] for row in plan.rows]
            packed = self.program.packed(plan.size, rows)
            self._flying.append((plan, self.program(self._params, packed)))
            self._steps[plan.size] += 1
            self._tokens += plan.tokens
            self._places += plan.size * self.program.rows
        return self._landed(*self._flying.popleft()) if self._flying else []

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """A vector of each text, `[texts, width]` float32.

        Args:
            texts: Token ids, as of `add`.

        Raises:
            InputError: A text cannot be read, before any is; or the model gave no numbers.
        """
        for at, text in enumerate(texts):
            self._check(text, f"texts[{at}]")
        order = {self.add(text): at for at, text in enumerate(texts)}
        found = np.zeros((len(texts), self.width), np.float32)
        while order:
            for one in self.step():
                at = order.pop(one.number, None)
                if at is not None and one.vector is None:
                    for number in order:
                        self.cancel(number)
                    raise InputError(f"texts[{at}]: {one.message}; leave it out")
                if at is not None:
                    found[at] = one.vector
        return found

    def _check(self, text: Sequence[int], name: str) -> None:
        check_tokens(text, self.program.config.vocab, name=name)
        if len(text) > self.longest:
            raise InputError(
                f"{name}: it has {len(text)} tokens, and at most {self.longest} are read; shorten"
                " it"
            )

    def _landed(self, plan: TextPlan, vectors: Any) -> list[Embedded]:
        """Wait for a step, and tell of its texts.

        One that gives no numbers spoils those beside it: then each is read in a step of its own.
        """
        found, told = np.asarray(vectors), []
        alone = len(plan.numbers) == 1
        for row, numbers in enumerate(plan.rows):
            for at, number in enumerate(numbers):
                if number not in self._texts:
                    continue
                vector = found[row, at]
                sound = bool(np.isfinite(vector).all())
                if sound or alone:
                    del self._texts[number]
                    told.append(Embedded(number, vector) if sound else _spoilt(number))
                else:
                    self._queue.again(number, len(self._texts[number]))
        return told


def _spoilt(number: int) -> Embedded:
    return Embedded(number, None, NOT_SOUND)
