"""What is served, and what is known of it before there is a mesh."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from colossax.aot import Target
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference.decode import decoding_model
from colossax.inference.engine.pages import paged_spec
from colossax.inference.engine.sizing import MIXED_TOKENS, PAGE_TOKENS
from colossax.inference.engine.stage_parts import check_staged
from colossax.inference.plan import parameters_alone, unrolled, with_stage_programs
from colossax.inference.reading import reads_of
from colossax.models import maker
from colossax.nn import CacheSpec, DecoderConfig, MakeModel, describe
from colossax.nn.quantised.serving import with_served
from colossax.planner.deciding.trial import choosing_for
from colossax.sharding import use
from colossax.typing import Dims, ParamInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What is served.

    Attributes:
        make_model: A factory of it, its matrices in the form that they are kept in.
        context: Most tokens of a request, prompt and continuation together; None: what the model
            can.
        cache: What pages are kept in, one of `FORMATS`.
        mixed: Tokens of a step with prompts.
        weights: What the matrices are kept in, for people.
        unroll: Whether each layer has arrays of its own, as `colossax serve` loads it.
    """

    make_model: MakeModel
    context: int | None = None
    cache: str = "own"
    mixed: int = MIXED_TOKENS
    weights: str = "own"
    unroll: bool = True

    @classmethod
    def of(cls, model: Any, *, weights: str = "own", **given: Any) -> "Served":
        """A model of the library.

        Args:
            model: Configuration of its family.
            weights: What its matrices are kept in, see `with_served`.
            given: As of the class.

        Raises:
            InputError: As `with_served`.
        """
        return cls(make_model=with_served(maker(model), weights), weights=weights, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheRow:
    """An array of the cache, of all layers that have it.

    Attributes:
        dims: Logical names; the second is of pages, or of seats.
        shape: With one page, or one seat.
        itemsize: Bytes of a number.
        of_seat: Whether it has a row for each seat, and not one for each page.
        read: Tokens of a full sequence that the next one looks at; 1 of what has a row for each
            seat.
    """

    dims: Dims
    shape: tuple[int, ...]
    itemsize: int
    of_seat: bool
    read: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedProfile:
    """What is known of a served model.

    Attributes:
        served: It.
        infos: Of each parameter, layers in stacks.
        config: Sizes of the decoder.
        rows: Arrays of its cache.
        context: Most tokens of a request.
    """

    served: Served
    infos: tuple[ParamInfo, ...]
    config: DecoderConfig
    rows: tuple[CacheRow, ...]
    context: int

    @property
    def pages_a_seat(self) -> int:
        """Of a request as long as it may be."""
        return -(-self.context // PAGE_TOKENS)

    @property
    def choices(self) -> int:
        """Experts that compute a token; 1 where there are none."""
        return 1 if self.config.mixture is None else self.config.mixture.choices

    @property
    def share(self) -> float:
        """Of a layer's experts, those that compute a token."""
        return 1.0 if self.config.mixture is None else self.choices / self.config.mixture.experts

    @property
    def group(self) -> int:
        """Heads of queries that meet each number of the cache."""
        if self.config.latent is not None:
            return 2 * self.config.heads  # a latent is key and value
        return self.config.heads // self.config.kv_heads


def profile_served(served: Served, plan: Plan) -> ServedProfile:
    """Describe a model as one device would have it.

    Args:
        served: What is served.
        plan: Its precision counts.

    Raises:
        InputError: The model cannot decode, reads more than a prompt, or no sequence of it is as
            long as `context`.

    Cost: a description, below a second; nothing is compiled or allocated.
    """
    alone = parameters_alone(plan).replace(mesh={"data": 1})
    bound = alone.bind(jax.devices()[:1])
    with use(bound):
        spec = describe(served.make_model)
    model = decoding_model(spec)
    config: DecoderConfig = model.config
    if reads_of(model).anything:
        raise InputError(
            "plan --serve: the model reads a source, sound or images before its tokens, which plans"
            " for serving do not count yet; serve it with a plan of your own (--plan.mesh)"
        )
    context = _context(config, served.context)
    return ServedProfile(
        served=served,
        infos=tuple(jax.tree.leaves(spec.infos)),
        config=config,
        rows=_rows(model, served, context, alone),
        context=context,
    )


def check_stages(profile: ServedProfile, plan: Plan) -> None:
    """Refuse a model of which stages cannot have parts.

    Raises:
        PlanError: See `check_staged`.

    Cost: the model is described twice, layer by layer.
    """
    make, alone = profile.served.make_model, parameters_alone(plan)
    devices = jax.devices()[:1] * 2  # nothing lies anywhere: what is asked is whether it could
    bound = alone.replace(mesh={"stage": 2}).bind(devices)
    with use(bound):
        spec = describe(make)
    cut = with_stage_programs(unrolled(bound.plan, spec), bound, profile.config.layers)
    bound = cut.bind(devices)
    with use(bound):
        check_staged(describe(make), bound)


def stages_refused(profile: ServedProfile, plan: Plan, target: Target) -> str | None:
    """Why stages cannot have parts of a model on a target; None where they can."""
    try:
        with choosing_for(target):
            check_stages(profile, plan)
    except PlanError as problem:
        return str(problem)
    return None


def _context(config: DecoderConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_seq
    if not 2 <= asked <= config.max_seq:
        raise InputError(
            f"--context: found {asked}, and the model's longest sequence is {config.max_seq}; give"
            f" 2 to {config.max_seq}"
        )
    return asked


def _rows(model: Any, served: Served, context: int, plan: Plan) -> tuple[CacheRow, ...]:
    asked = paged_spec(
        model, seats=1, pages=1, page_tokens=PAGE_TOKENS, slots=context, form=served.cache
    )
    seen = _by_kind(model.cache_spec(seats=1, slots=context, chunk=1))
    fixed = asked.fixed if isinstance(asked.fixed, Mapping) else {"": asked.fixed}
    found = []
    for kind, spec in _by_kind(asked.specs).items():
        dtypes = jax.eval_shape(lambda one=spec: one.zeros(plan.precision))
        slots = [a.shape[2] for a in seen[kind].arrays.values() if a.coded and len(a.shape) > 2]
        for name, one in spec.arrays.items():
            of_seat = name in fixed[kind]
            found.append(
                CacheRow(
                    dims=one.dims,
                    shape=one.shape,
                    itemsize=np.dtype(dtypes[name].dtype).itemsize,
                    of_seat=of_seat,
                    read=1 if of_seat else min(max(slots, default=context), context),
                )
            )
    return tuple(found)


def _by_kind(specs: CacheSpec | Mapping[str, CacheSpec]) -> dict[str, CacheSpec]:
    return dict(specs) if isinstance(specs, Mapping) else {"": specs}
