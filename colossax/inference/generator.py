"""Prompts continued by a model: the decode program, its cache and a scheduler put together."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from colossax.config import BoundPlan
from colossax.inference.cache import Cache
from colossax.inference.decode import TOKENS_PER_STEP, Chunk, DecodeProgram, Sampling
from colossax.inference.scheduler import InOrder, Request, Scheduler
from colossax.nn import ModelSpec
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt_tokens: What was asked.
        tokens: What the model added, an end-of-sequence token included where it came.
        ended: Whether the end-of-sequence token came, rather than the limit.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: bool


class Generator:
    """Continues one prompt at a time with parameters laid out by a plan.

    Cost: one compilation, at first use. A step computes `tokens_per_step` tokens in every layer and
    the head for one of them; a prompt of p tokens takes ceil(p / tokens_per_step) steps, each
    further token one. Holds `2 layers slots kv_heads head_dim` cache items over the devices that
    split `kv_heads`, of layers with a window at most `window + tokens_per_step - 1` slots; the
    cache is donated from step to step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        *,
        slots: int | None = None,
        eos: int | None = None,
        tokens_per_step: int = TOKENS_PER_STEP,
    ):
        """Prepare the step.

        Args:
            spec: The model, as `describe` gave it under `bound`; the families of
                `colossax.models`, or any model with their `decode`, `logits`, `cache_spec`
                and `config`.
            bound: Where the parameters live.
            params: Laid out by `bound`; kept, not donated. Layers in host memory are fetched one
                after another. Shapes with shardings do for `lowered`.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            eos: Token that ends a continuation; default the model's, if it names one.
            tokens_per_step: Flat tokens of a step.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`.
        """
        program = DecodeProgram(spec, bound, slots=slots, width=tokens_per_step)
        self._start(program, params, program.config.eos if eos is None else eos)

    def _start(self, program: DecodeProgram, params: Params, eos: int | None) -> None:
        self.program = program
        self.eos = eos
        self._params = params

    def with_params(self, params: Params) -> "Generator":
        """A generator with other parameters of the same shapes and layout.

        It shares the compiled program.
        """
        other = object.__new__(Generator)
        other._start(self.program, params, self.eos)
        return other

    @property
    def bound(self) -> BoundPlan:
        """Devices, and the plan as generation has it."""
        return self.program.bound

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Generation:
        """Continue `prompt` until the end-of-sequence token or `max_tokens`.

        Args:
            prompt: Token ids, at least one.
            max_tokens: Most tokens to add.
            temperature: Logits are divided by it before sampling; 0 takes the likeliest token.
            seed: The token at position p is drawn with `fold_in(key(seed), p)`, so it depends on
                neither the mesh nor the way the prompt was cut.

        Raises:
            InputError: The prompt is empty, holds ids outside the vocabulary, or does not fit
                into `slots` together with `max_tokens`; a temperature or seed below 0.
        """
        prompt = tuple(map(int, prompt))
        tokens = tuple(
            self.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        )
        ended = tokens[-1] == self.eos
        return Generation(prompt_tokens=prompt, tokens=tokens, ended=ended)

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """The tokens of `generate` as they come."""
        request = Request(
            prompt=tuple(map(int, prompt)),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        request.check(vocab=self.program.config.vocab, slots=self.program.slots)
        scheduler = InOrder([request], width=self.program.width, eos=self.eos)
        return (token for _, token in self.follow(scheduler))

    def follow(self, scheduler: Scheduler) -> Iterator[tuple[int, int]]:
        """What a scheduler's calls give, as `(sequence, token)`.

        Args:
            scheduler: Its requests are checked by whoever made them.

        Cost: a cache for each sequence that has begun and not ended.
        """
        caches: dict[int, Cache] = {}
        while (call := scheduler.next()) is not None:
            begun = call.sequence in caches
            cache = caches.pop(call.sequence) if begun else self.program.cache.empty()
            tokens = Chunk.of(call, self.program.width)
            token, caches[call.sequence] = self.program(
                self._params, cache, tokens, Sampling.of(call)
            )
            if call.emits:
                token = int(token)
                if scheduler.took(call.sequence, token):
                    del caches[call.sequence]
                yield call.sequence, token

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes and shardings of what a step gets: parameters, cache, tokens and numbers."""
        return self.program.arguments(self._params)

    def lowered(self) -> Any:
        """The step as `generate` runs it, traced and not compiled."""
        return self.program.lowered(self._params)
