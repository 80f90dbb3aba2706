"""Prompts that are all known, continued together by an engine that is as large as they need."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError
from colossax.inference.decode import decoding_model
from colossax.inference.engine import Drafter, Engine, EngineStats, Replicas
from colossax.inference.engine.driving import Over
from colossax.inference.engine.keeping import check_all_kept
from colossax.inference.engine.making import whole
from colossax.inference.engine.parts import params_on, replicas_of
from colossax.inference.engine.program import EngineProgram
from colossax.inference.engine.sizing import SEATS, sizes_for, with_room
from colossax.inference.generator import Generation, Generator
from colossax.inference.scheduler import Request
from colossax.nn import ModelSpec
from colossax.scheduling import Emitted, EngineRequest, SamplingConfig
from colossax.typing import Params


@runtime_checkable
class Several(Protocol):
    """Prompts on their way to their ends, each as if alone."""

    @property
    def notice(self) -> str | None:
        """For people: why the plan is not followed to the letter; None where it is."""
        ...

    @property
    def bound(self) -> BoundPlan:
        """Devices, and the plan as generation has it."""
        ...

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes and shardings of what the largest program gets."""
        ...

    def lowered(self) -> Any:
        """That program, traced and not compiled."""
        ...

    def with_params(self, params: Params) -> "Several":
        """The same prompts to other parameters of the same shapes and layout, same programs."""
        ...

    def again(self, params: Params, requests: Sequence[EngineRequest]) -> "Several":
        """Other prompts to such parameters, by the same programs.

        Args:
            params: As of `with_params`.
            requests: None longer than the longest of the first ones; what ends them is their own.
        """
        ...

    @property
    def stats(self) -> EngineStats | None:
        """Of the engines of the last run; None before it, and of stages."""
        ...

    def run(self, over: Over | None = None) -> list[Generation]:
        """The continuations, in the order of the requests.

        Args:
            over: Which of them end before their own ends; stages say what is left all the same.

        Raises:
            InputError: A request cannot be served, before any is; or the model gave no numbers.
            PlanError: The devices have no room for the longest of them.
        """
        ...


def several(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    *,
    requests: Sequence[EngineRequest],
    eos: int | None = None,
    drafter: Drafter | None = None,
    adapters: Sequence[str] = (),
    seats: int = SEATS,
    beside: int = 0,
) -> Several:
    """What continues these prompts; nothing is compiled yet.

    Up to `seats` at once share each step of an `Engine`, of which each place along mesh axis `data`
    has one. With stages it is `Generator`, whose stages each work on a group of the prompts.

    Args:
        spec: The model, as `describe` gave it under `bound`.
        bound: Where the parameters live.
        params: Laid out by `bound`; kept. Shapes with shardings do for `lowered`.
        requests: One or more.
        eos: Token that ends a continuation, beside those of its request.
        drafter: See `Engine`.
        adapters: Names of those that the model has side by side.
        seats: Sequences of an engine at once.
        beside: Bytes of each device that something else has, as an optimizer its state.

    Raises:
        InputError: The model cannot decode, an adapter is unknown, or there are stages, and tokens
            are guessed or drawn otherwise than by temperature, or there are several adapters.

    Cost: a compilation where all prompts are short, else two. Holds parameters and a cache for the
    longest of the requests, for as many as have seats, or as many as there is room for.
    """
    config = decoding_model(spec).config
    ends = eos is not None and 0 <= eos < config.vocab
    given = [_ending(one, eos) if ends else one for one in requests]
    longest = config.max_seq
    if bound.mesh.shape[MeshAxis.STAGE] > 1:
        if drafter is not None:
            raise InputError(
                "draft: stages take one token after another, and guess none; leave it out, or give"
                " the devices of 'stage' to 'tensor' or 'fsdp'"
            )
        if adapters:
            raise InputError(
                f"adapters: {len(adapters)} are side by side, and with stages one is multiplied"
                " after another; give the devices of 'stage' to 'tensor' or 'fsdp'"
            )
        asked = [_plain(one) for one in requests]
        check_all_kept(given)
        slots = sizes_for(given, longest).slots
        sizes = {"slots": slots, "sequences": len(asked), "eos": eos}
        return _InStages(Generator(spec, bound, params, **sizes), asked)
    parts = replicas_of(bound)
    draft = 0 if drafter is None else drafter.tokens
    sizes = sizes_for(given, longest, draft, engines=len(parts), seats=seats)
    programs = [
        EngineProgram(spec, one, sizes, None if drafter is None else drafter.on(one))
        for one in parts
    ]
    return _Together(spec, bound, programs, params, given, tuple(adapters), beside)


class _Together:
    """By an engine, or one for each place along `data`."""

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        programs: list[EngineProgram],
        params: Params,
        requests: list[EngineRequest],
        adapters: tuple[str, ...],
        beside: int,
    ):
        self._spec, self._bound, self._programs, self._beside = spec, bound, programs, beside
        self._requests, self._params, self._adapters = requests, params, adapters
        self._has_room = False
        self.stats: EngineStats | None = None

    @property
    def notice(self) -> str | None:
        return None

    @property
    def bound(self) -> BoundPlan:
        return whole(self._bound)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self._programs[0].arguments("mixed", self._given(self._programs[0]))

    def lowered(self) -> Any:
        return self._programs[0].lowered("mixed", self._given(self._programs[0]))

    def with_params(self, params: Params) -> "_Together":
        return self.again(params, self._requests)

    def again(self, params: Params, requests: Sequence[EngineRequest]) -> "_Together":
        self._settle()
        given = params, [*requests], self._adapters, self._beside
        other = _Together(self._spec, self._bound, self._programs, *given)
        other._has_room = True
        return other

    def run(self, over: Over | None = None) -> list[Generation]:
        self._settle()
        engines = [
            Engine.of(
                program,
                self._given(program),
                deterministic=program.sizes.decode == program.sizes.mixed,
                # All are there from the start, and processes that share the devices must agree.
                clock=lambda: 0.0,
                adapters=self._adapters,
            )
            for program in self._programs
        ]
        one = engines[0] if len(engines) == 1 else Replicas(self.bound, engines)
        told = one.generate_all(self._requests, over)
        self.stats = one.stats
        return [_generation(*one) for one in enumerate(zip(self._requests, told, strict=True), 1)]

    def _given(self, program: EngineProgram) -> Params:
        """Parameters as an engine has them, made when they are needed: training gives those that
        are kept here up, and others would stay."""
        if len(self._programs) == 1:
            return self._params
        return params_on(self._spec, program.bound, self._params)

    def _settle(self) -> None:
        if not self._has_room:
            self._programs, self._has_room = self._with_room(), True

    def _with_room(self) -> list[EngineProgram]:
        """Programs of which the devices hold the pages: as many in each."""
        first = with_room(self._programs[0], self._given(self._programs[0]), beside=self._beside)
        others = [
            EngineProgram(self._spec, one.bound, first.sizes, one.drafter)
            for one in self._programs[1:]
        ]
        return [first, *others] if first is not self._programs[0] else self._programs


class _InStages:
    """By a generator."""

    def __init__(self, generator: Generator, requests: list[Request]):
        self._generator, self._requests, self.stats = generator, requests, None

    @property
    def notice(self) -> str | None:
        return self._generator.notice

    @property
    def bound(self) -> BoundPlan:
        return self._generator.bound

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self._generator.arguments

    def lowered(self) -> Any:
        return self._generator.lowered()

    def with_params(self, params: Params) -> "_InStages":
        return self.again(params, self._requests)

    def again(self, params: Params, requests: Sequence[Any]) -> "_InStages":
        asked = [_plain(one) if isinstance(one, EngineRequest) else one for one in requests]
        return _InStages(self._generator.with_params(params), asked)

    def run(self, over: Over | None = None) -> list[Generation]:
        return self._generator.generate_all(self._requests)


def _ending(request: EngineRequest, eos: int) -> EngineRequest:
    return dataclasses.replace(request, ends=(*request.ends, eos))


def _generation(number: int, asked: tuple[EngineRequest, list[Emitted]]) -> Generation:
    """What came of a request."""
    request, told = asked
    last = told[-1]
    if last.ended == "error":
        raise InputError(f"prompt {number}: {last.message}; look at the checkpoint's parameters")
    tokens = tuple(one.token for one in told if one.token is not None)
    return Generation(
        prompt_tokens=request.prompt,
        tokens=tokens,
        ended=last.ended == "stop",
        scores=told[0].scores,
        logprobs=tuple(one.logprob for one in told if one.logprob is not None),
    )


def _plain(request: EngineRequest) -> Request:
    """As stages take it.

    Raises:
        InputError: It asks for more than they do.
    """
    asked = request.sampling
    if request.score_from is not None:
        raise InputError(
            "score_from: with stages no prompt is scored; give the devices of 'stage' to 'tensor'"
            " or 'fsdp'"
        )
    own = SamplingConfig(temperature=asked.temperature, seed=asked.seed)
    for name, value in vars(own).items():
        if (found := getattr(asked, name)) != value:
            raise InputError(
                f"{name}: found {found}, and with stages tokens are drawn by temperature alone;"
                " leave it out, or give the devices of 'stage' to 'tensor' or 'fsdp'"
            )
    return Request(
        prompt=request.prompt,
        source=request.source,
        frames=request.frames,
        images=request.images,
        max_tokens=request.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
    )
