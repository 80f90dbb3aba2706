"""Prompts continued by a model: a program, its caches and a scheduler put together."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError
from colossax.inference.cache import Cache
from colossax.inference.crossing import cross
from colossax.inference.decode import TOKENS_PER_STEP, Chunk, DecodeProgram, Sampling
from colossax.inference.plan import together
from colossax.inference.scheduler import InOrder, Request, Scheduler
from colossax.inference.stages import StagedProgram, why_gathered
from colossax.nn import ModelSpec
from colossax.scheduling.reading import NOTHING
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt_tokens: What was asked.
        tokens: What the model added, an end-of-sequence token included where it came.
        ended: Whether the end-of-sequence token came, rather than the limit.
        scores: Of the prompt's tokens, see `Emitted`; none where nobody asked an engine for them.
        logprobs: Of what was added, before any temperature; none likewise.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: bool
    scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    logprobs: tuple[float, ...] = ()


class Generator:
    """Continues prompts with parameters laid out by a plan.

    One at a time; on a mesh with stages several, each stage working on a group of its own, and
    weights stay where they are. Tokens are those of one device.

    Attributes:
        program: `DecodeProgram`, or with stages `StagedProgram`.
        notice: With stages, why each device runs all layers instead; None where it does not.

    Cost: one compilation, at first use. A step computes `tokens_per_step` tokens in every layer and
    the head for one of them; a prompt of p tokens takes ceil(p / tokens_per_step) steps, each
    further token one. Holds `2 layers slots kv_heads head_dim` cache items over the devices that
    split `kv_heads`, of layers with a window at most `window + tokens_per_step - 1` slots; the
    cache is donated from step to step. With stages a step is a tick, in which each stage runs its
    own layers; a token takes as many ticks as there are stages, and they hold `sequences` caches.
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
        sequences: int | None = None,
    ):
        """Prepare the step.

        Args:
            spec: The model, as `describe` gave it under `bound`; the families of
                `colossax.models`, or any model with their `decode`, `logits`, `cache_spec`
                and `config`.
            bound: Where the parameters live.
            params: Laid out by `bound`; kept, not donated. Layers in host memory are fetched one
                after another; those of stages with programs of their own are copied to all stages
                (`together`). Shapes with shardings do for `lowered`.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            eos: Token that ends a continuation; default the model's, if it names one.
            tokens_per_step: Flat tokens of a step.
            sequences: With stages: how many are on their way at once, cut into as many groups as
                stages; default one for each. Without, it is one at a time.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`.
        """
        self._laid_out = functools.partial(together, spec, bound)
        bound, params = self._laid_out(params)
        self.notice = why_gathered(spec, bound)
        sizes = {"slots": slots, "width": tokens_per_step}
        if bound.mesh.shape[MeshAxis.STAGE] > 1 and self.notice is None:
            program = StagedProgram(spec, bound, **sizes, sequences=sequences)
        else:
            program = DecodeProgram(spec, bound, **sizes)
        self._start(program, params, program.config.eos if eos is None else eos)

    def _start(
        self, program: DecodeProgram | StagedProgram, params: Params, eos: int | None
    ) -> None:
        self.program = program
        self.eos = eos
        self._params = params

    def with_params(self, params: Params) -> "Generator":
        """A generator with other parameters of the same shapes and layout.

        It shares the compiled program.
        """
        other = object.__new__(Generator)
        other.notice, other._laid_out = self.notice, self._laid_out
        other._start(self.program, self._laid_out(params)[1], self.eos)
        return other

    @property
    def bound(self) -> BoundPlan:
        """Devices, and the plan as generation has it."""
        return self.program.bound

    def generate(
        self,
        prompt: Sequence[int],
        *,
        source: Sequence[int] = (),
        frames: Any = None,
        images: Any = None,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Generation:
        """Continue `prompt` until the end-of-sequence token or `max_tokens`.

        Args:
            prompt: Token ids, at least one; of an encoder-decoder what its text begins with.
            source: What its encoder reads.
            frames: Sound that it reads in place of that, `[frames, mels]`, an even number.
            images: What places among the prompt's tokens name, `[images, height, width, channels]`:
                token `vocab + k` is the k-th of them, see `nn.SeeingDecoder`.
            max_tokens: Most tokens to add.
            temperature: Logits are divided by it before sampling; 0 takes the likeliest token.
            seed: The token at position p is drawn with `fold_in(key(seed), p)`, so it depends on
                neither the mesh nor the way the prompt was cut.

        Raises:
            InputError: The prompt is empty, holds ids outside the vocabulary, or does not fit
                into `slots` together with `max_tokens`; a temperature or seed below 0.
        """
        how = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        request = _request(prompt, source, frames=frames, images=images, **how)
        return self.generate_all([request])[0]

    def generate_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Continue several prompts, each to its end; what comes of one depends on no other.

        Raises:
            InputError: As for `generate`, before anything runs.
        """
        tokens: list[list[int]] = [[] for _ in requests]
        for sequence, token in self._streamed(requests):
            tokens[sequence].append(token)
        return [
            Generation(
                prompt_tokens=request.prompt, tokens=tuple(found), ended=found[-1] == self.eos
            )
            for request, found in zip(requests, tokens, strict=True)
        ]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        source: Sequence[int] = (),
        frames: Any = None,
        images: Any = None,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """The tokens of `generate` as they come."""
        how = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        request = _request(prompt, source, frames=frames, images=images, **how)
        return (token for _, token in self._streamed([request]))

    def _streamed(self, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
        program = self.program
        for request in requests:
            request.check(
                vocab=program.config.vocab,
                slots=program.slots,
                reads=getattr(program, "reads", NOTHING),
            )
            _check_at_once(program.config, len(request.prompt), program.width)
        at_once = program.sequences if isinstance(program, StagedProgram) else 1
        return self.follow(InOrder(requests, width=program.width, eos=self.eos, at_once=at_once))

    def follow(self, scheduler: Scheduler) -> Iterator[tuple[int, int]]:
        """What a scheduler's calls give, as `(sequence, token)`.

        Args:
            scheduler: Its requests are checked by whoever made them.

        Raises:
            InputError: With stages: more sequences have begun and not ended than `sequences`.

        Cost: a cache for each sequence that has begun and not ended; with stages, `sequences`.
        """
        if isinstance(self.program, StagedProgram):
            return cross(self.program, self._params, scheduler)
        return self._one_by_one(self.program, scheduler)

    def _one_by_one(
        self, program: DecodeProgram, scheduler: Scheduler
    ) -> Iterator[tuple[int, int]]:
        caches: dict[int, Cache] = {}
        while (call := scheduler.next()) is not None:
            begun = call.sequence in caches
            if begun:
                cache = caches.pop(call.sequence)
            else:
                asked = call.request
                given = asked.source, asked.frames, asked.images
                cache = program.begin(self._params, *given)
            tokens = Chunk.of(call, program.width)
            token, caches[call.sequence] = program(self._params, cache, tokens, Sampling.of(call))
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


def _request(
    prompt: Sequence[int], source: Sequence[int], *, frames: Any, images: Any, **how: Any
) -> Request:
    """A request of token ids of any type of integer."""
    given = {"frames": frames, "images": images}
    arrays: dict[str, Any] = {
        name: None if x is None else np.asarray(x) for name, x in given.items()
    }
    ids: dict[str, Any] = {"prompt": tuple(map(int, prompt)), "source": tuple(map(int, source))}
    return Request(**ids, **arrays, **how)


def _check_at_once(config: Any, prompt: int, width: int) -> None:
    """Refuse a prompt in several calls whose rotary embedding must know its whole length."""
    rope = getattr(config, "rope", None)
    stretched_from = None if rope is None else rope.stretched_from
    if stretched_from is not None and prompt > max(stretched_from, width):
        raise InputError(
            f"prompt: it has {prompt} tokens, of which a call takes {width}, and the model's"
            f" rope_scaling depends on the length above {stretched_from}; give tokens_per_step"
            f" {prompt}"
        )
