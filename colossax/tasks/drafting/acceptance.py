"""How many drafted tokens a target accepts, on text that neither has seen."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from colossax.data.corpus import Split
from colossax.nn.drafting.drafter import DRAFTER, TARGET
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.sharding import replicated, use
from colossax.step.microbatches import row_unit
from colossax.step.step import Step
from colossax.typing import Params

PROMPTS = 16
"""Prompts that are continued, rounded up to rows that the devices share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Greedy drafts against what the target says.

    Attributes:
        accepted: Of each draft, how many of its tokens in a row are the target's.
        block: Tokens of a draft.
    """

    accepted: np.ndarray
    block: int

    @property
    def mean(self) -> float:
        """Accepted tokens of a draft; the target adds one more to each."""
        return float(np.mean(self.accepted)) if len(self.accepted) else float("nan")

    @property
    def rate(self) -> float:
        """Share of the tokens that were looked at which were accepted: those after a rejection are
        not looked at."""
        return _share(self.accepted.sum(), np.minimum(self.accepted + 1, self.block).sum())

    @property
    def by_place(self) -> list[float]:
        """Likewise of each place in a draft."""
        return [
            _share((self.accepted > at).sum(), (self.accepted >= at).sum())
            for at in range(self.block)
        ]


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else float("nan")


class Continued:
    """Held-out prompts, each with what the target says after it, greedily; made once."""

    def __init__(self, documents: Sequence[Split], length: int, eos: int):
        """Nothing is read yet.

        Args:
            documents: Held out, of each source.
            length: Tokens of prompt and continuation; a quarter is prompt.
            eos: Token that ends a continuation.
        """
        self._documents, self._length, self._eos = documents, length, eos
        self._made: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __call__(self, step: Step, params: Params) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows `[rows, length]` filled up by 0, tokens of each one's prompt, and of all of it.

        Args:
            step: Of target and drafter.
            params: Of both.

        Cost: a continuation of each prompt by the target, at the first call alone.
        """
        if self._made is None:
            unit = row_unit(step.bound)
            prompts = self._prompts(-(-PROMPTS // unit) * unit)
            self._made = self._rows(prompts, self._said(step, params, prompts))
        return self._made

    def _prompts(self, count: int) -> list[tuple[int, ...]]:
        """From the beginning of each document, then further on in each."""
        width = max(1, self._length // 4)
        every = [(split, at) for split in self._documents for at in range(split.document_count)]
        found = []
        for number in range(count):
            split, at = every[number % len(every)]
            start, length = int(split.starts[at]), int(split.lengths[at])
            begin = number // len(every) * width
            begin = begin if begin + width <= length else 0
            piece = np.asarray(split.tokens[start + begin : start + min(begin + width, length)])
            found.append(tuple(int(token) for token in piece))
        return found

    def _said(self, step: Step, params: Params, prompts: Sequence[tuple[int, ...]]) -> list[Any]:
        from colossax.inference.several import several  # what generates is loaded where it does

        asked = [
            EngineRequest(
                prompt=prompt,
                max_tokens=self._length - len(prompt),
                sampling=SamplingConfig(temperature=0.0),
            )
            for prompt in prompts
        ]
        given = step.spec_of(TARGET), step.bound, params[TARGET]
        return [one.tokens for one in several(*given, requests=asked, eos=self._eos).run()]

    def _rows(self, prompts: Sequence[Any], said: Sequence[Any]) -> tuple[Any, Any, Any]:
        rows = np.zeros((len(prompts), self._length), np.int32)
        for row, prompt, more in zip(rows, prompts, said, strict=True):
            row[: len(prompt) + len(more)] = (*prompt, *more)
        begin = np.asarray([len(prompt) for prompt in prompts])
        return rows, begin, begin + np.asarray([len(more) for more in said])


class Acceptances:
    """Measures a drafter, by a program that is compiled once."""

    def __init__(self, continued: Continued, block: int):
        """Compile nothing yet.

        Args:
            continued: What is drafted.
            block: Tokens of a draft.
        """
        self._continued, self._block = continued, block
        self._program = functools.lru_cache(maxsize=1)(self._jitted)

    def __call__(self, step: Step, params: Params) -> Acceptance:
        """Drafts from one verified token to the next, as decoding takes them.

        While all drafted tokens are the target's, the drafter reads what the target said: so one
        pass over the text, for each place where a block may begin, tells every draft's length. Of
        one layer that is exact. With several, a token's own keys in deeper layers depend on the
        draft that it was first read in: here on blocks of full length, one after another.
        """
        rows, begin, end = self._continued(step, params)
        right = np.asarray(jax.device_get(self._program(step)(params, rows)))
        lengths = draft_lengths(right, self._block)
        return Acceptance(accepted=walk(lengths, begin, end, self._block), block=self._block)

    def _jitted(self, step: Step) -> Any:
        def run(params: Params, rows: Array) -> Array:
            with use(step.bound):
                return told_right(step.spec.merge(params), rows, self._block, _chunks(step))

        return jax.jit(run, out_shardings=replicated(step.bound))


def _chunks(step: Step) -> int:
    return step.bound.plan.loss.vocab_chunks


def told_right(
    models: Any, rows: Int[Array, "b s"], block: int, chunks: int
) -> Bool[Array, "block b s"]:
    """Whether the likeliest next token is the row's, with blocks from each offset on.

    Args:
        models: Target and drafter.
        rows: Of one document each.
        block: Tokens of a draft.
        chunks: Parts of a row, of which one has its logits alive at a time.

    Cost: a forward pass of the target, and `block` of the drafter and of the head.
    """
    target, drafter = models[TARGET], models[DRAFTER]
    _, keys = target.hidden_and_keys(rows)
    embedded, wanted = target.embedded(rows), jnp.roll(rows, -1, axis=1)

    def of(offset: Int[Array, ""]) -> Array:
        offsets = jnp.broadcast_to(offset, rows.shape[:1])
        hidden = drafter.hidden(embedded, keys, offsets)
        parts = jnp.array_split(hidden, chunks, axis=1)
        likeliest = [jnp.argmax(target.logits(part), axis=-1) for part in parts]
        return jnp.concatenate(likeliest, axis=1) == wanted

    return jax.lax.map(of, jnp.arange(block, dtype=jnp.int32))


def draft_lengths(right: np.ndarray, block: int) -> np.ndarray:
    """Of a draft that begins at each place, how many tokens in a row are right, `[b, s]`.

    A draft at n tells the tokens n + 1 to n + block, from what the target has seen before n. Places
    so near to the end that a draft would leave the row have -1.

    Args:
        right: Of `told_right`.
        block: Tokens of a draft.
    """
    _, rows, length = right.shape
    found = np.full((rows, length), -1)
    for n in range(length - block):
        run = right[-n % block, :, n : n + block]
        found[:, n] = np.cumprod(run, axis=1).sum(axis=1)
    return found


def walk(lengths: np.ndarray, begin: np.ndarray, end: np.ndarray, block: int) -> np.ndarray:
    """Accepted tokens of the drafts that decoding would make, row after row.

    The first begins at the first token behind the prompt; the next at the token that the target
    gave in place of the first wrong one, or after the last right one.

    Args:
        lengths: Of `draft_lengths`.
        begin: Tokens of each row's prompt.
        end: Tokens of each row.
        block: Tokens of a draft; those that would leave the row are not counted.
    """
    accepted = []
    for row, at, last in zip(lengths, begin, end, strict=True):
        while at + block < last:
            accepted.append(row[at])
            at += row[at] + 1
    return np.asarray(accepted, np.int64)
