"""A checkpoint's parameters, alone, laid out for inference."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from colossax.checkpoint import RecordReader, find_checkpoint, slot_of
from colossax.checkpoint.base import base_of, check_base, checksum
from colossax.checkpoint.broken import chosen
from colossax.config import BoundPlan, Plan, Precision, from_json
from colossax.data import Tokenizer
from colossax.errors import CheckpointError, InputError
from colossax.inference.embedding import tells_embeddings, with_embedding
from colossax.inference.engine.stage_parts import check_staged
from colossax.inference.fitting import Fitted, fit_layers
from colossax.inference.generator import Generator
from colossax.inference.loaded import LoadedModel, held_as, stood
from colossax.inference.outliers import Outliers
from colossax.inference.plan import (
    one_stack,
    param_shapes,
    parameters_alone,
    unrolled,
    with_stage_programs,
)
from colossax.inference.several import Several
from colossax.inference.stored.documents import (
    MODEL,
    configuration_of,
    precision_of,
    tokenizer_of,
)
from colossax.inference.stored.grids import KeptGrids
from colossax.models import config_from_json, maker
from colossax.models.adapters.quantising import read_with_codes
from colossax.models.adapters.stored import learned_head
from colossax.nn import AdapterConfig, DecoderConfig, MakeModel, ModelSpec, describe, with_adapter
from colossax.nn.quantised.forms import KEPT, check_form
from colossax.nn.quantised.serving import with_served
from colossax.sharding import use, validate
from colossax.sharding.rules import uneven_layers
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What a checkpoint says of its model, before any parameter is read.

    Attributes:
        directory: Of the checkpoints.
        step: Which of them.
        model: Configuration of its family.
        precision: How to compute: as the run did; parameters in the type they are stored in.
        tokenizer: None where the checkpoint holds none.
        name: Of the model, where the checkpoint holds several.
        adapter: What it holds of the model alone, if it has an adapter.
        base: Then the checkpoint of the rest, and the model's name there.
        weights: How matrices are to be kept, see `with_weights`.
        outliers: Inputs that are kept as they are beside codes, see `find_outliers`.
    """

    directory: Path
    step: int
    model: Any
    precision: Precision
    tokenizer: Tokenizer | None
    name: str = MODEL
    adapter: AdapterConfig = AdapterConfig()
    base: tuple[RecordReader, str] | None = None
    weights: str = "own"
    outliers: Outliers | None = None

    def with_weights(
        self, form: str, *, outliers: Outliers | str | Path | None = None
    ) -> "StoredModel":
        """The same, its matrices to be kept in a form of `nn.quantised.forms.SERVED`; see there.

        With `int8` and `fp8` inputs may be kept as they are: `outliers`, or the file of some.

        Raises:
            InputError: The form is unknown or has no outliers, their file is none, or this is an
                adapter, whose base has a form already; or codes are to be kept, and there are none.
        """
        check_form(form, outliers=outliers is not None)
        if form != "own" and self.adapter:
            raise InputError(
                f"weights: {form} is asked for, and '{self.directory}' is an adapter, which learned"
                f" beside matrices kept as {self.adapter.base}; export it merged, or give own"
            )
        if form == KEPT:
            KeptGrids(*self.origin).check()
        found = Outliers.read(outliers) if isinstance(outliers, str | Path) else outliers
        return dataclasses.replace(self, weights=form, outliers=found)

    def embedding(self, *, pool: str, normalise: bool = True) -> "StoredModel":
        """The same, telling a vector of each text; see `inference.embedding.with_embedding`."""
        return dataclasses.replace(self, model=with_embedding(self.model, pool, normalise))

    @property
    def embeds(self) -> bool:
        """Whether it tells a vector of each text."""
        return tells_embeddings(getattr(self.model, "head", None))

    @property
    def chosen(self) -> str:
        """Which step this is, for people, and which later ones are broken."""
        return chosen(self.directory, self.step)

    @functools.cached_property
    def config(self) -> DecoderConfig:
        """Sizes of the decoder."""
        return self.model.decoder()

    @property
    def origin(self) -> tuple[RecordReader, str]:
        """See `LoadedModel`."""
        return self.base or (RecordReader(self.directory, self.step), self.name)

    @property
    def frozen(self) -> bool:
        """Whether what it holds is what others learned beside."""
        return False

    @property
    def plan(self) -> Plan:
        """The plan used where none is asked for: all devices on `fsdp`."""
        return Plan(precision=self.precision)

    @property
    def make_model(self) -> MakeModel:
        """A factory of it, its matrices in their form."""
        return self._make_model()

    def load(
        self,
        plan: Plan | None = None,
        devices: Sequence[jax.Device] | None = None,
        *,
        slots: int | None = None,
        base: LoadedModel | None = None,
        unroll: bool = False,
        weights: str | None = None,
    ) -> LoadedModel:
        """Read the parameters onto devices, and into host memory as `plan.offload` says.

        Each device reads its own shards; the optimizer's state stays on disk. What goes to host
        memory passes through no device; while it is read, the largest stack is there twice.

        Args:
            plan: Default `self.plan`. With `offload.auto`, `fit` finds the shares.
            devices: Default all. Layers that stages among them do not divide are on each stage.
            slots: For `fit`.
            base: Of an adapter: what has been loaded already, its base or another adapter beside
                it, in place of `plan` and `devices`. Their arrays of the base are one and the same;
                the adapter alone is read.
            unroll: Whether each layer has arrays of its own, see `unrolled`, and each stage has its
                own programs, see `make_engine`: as many layers each, or as `plan.pipeline.cuts`.
            weights: See `with_weights`; default what was said there. Codes are made of one matrix
                after another as it is read: of floats no more is ever there.

        Raises:
            InputError: As `with_weights`.
            PlanError: The plan does not fit model or devices, or has a budget for nothing.
            CheckpointError: Records are missing, of another model, or damaged; or `base` is of
                another base, or keeps its matrices in another form.
        """
        if weights is not None:
            return self.with_weights(weights, outliers=self.outliers).load(
                plan, devices, slots=slots, base=base, unroll=unroll
            )
        if base is not None:
            self.check_beside(base)
            with use(base.bound):
                spec = describe(self._make_model())
            validate(base.bound, spec.infos)
            return self._loaded(base.bound, spec, self._frozen_of(base, spec))
        plan = plan or self.plan
        plan.check_budgets()
        cuts, plan = plan.pipeline.cuts, parameters_alone(plan)
        if plan.offload.auto:
            plan = self.fit(plan, devices, slots=slots).plan
        bound, spec = self._described(plan, devices)
        if unroll:
            plan = with_stage_programs(unrolled(plan, spec), bound, self.config.layers, cuts)
            bound, spec = self._described(plan, devices)
            check_staged(spec, bound)
        return self._loaded(bound, spec, {})

    def _loaded(
        self, bound: BoundPlan, spec: ModelSpec, frozen: Mapping[int, jax.Array]
    ) -> LoadedModel:
        return LoadedModel(
            spec=spec,
            bound=bound,
            params=self._read(bound, spec, frozen),
            config=self.config,
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            origin=self.origin,
            weights=self.weights,
        )

    def check_beside(self, base: "LoadedModel | StoredModel") -> None:
        """Refuse to be an adapter beside what `load` is given as `base`.

        Raises:
            CheckpointError: This is no adapter, or one of another base, or of one in another form.
        """
        where = f"checkpoint '{self.directory}' step {self.step}"
        if self.base is None:
            raise CheckpointError(f"{where} holds a whole model and no adapter; load it apart")
        theirs, name = base.origin
        check_base(theirs, name, checksum(*self.base), where)
        form = (self.adapter.base, self.adapter.double)
        if form != (base.adapter.base, base.adapter.double):
            raise CheckpointError(
                f"{where} was trained beside a base whose matrices are kept as {form[0]}"
                f"{', double' if form[1] else ''}, and those that are loaded are kept as"
                f" {base.adapter.base}{', double' if base.adapter.double else ''}; load it apart"
            )

    @staticmethod
    def _frozen_of(base: LoadedModel, spec: ModelSpec) -> dict[int, jax.Array]:
        """Arrays of a loaded base, by the place that they have in another model."""
        held = zip(jax.tree.leaves(base.spec.infos), jax.tree.leaves(base.params), strict=True)
        arrays = {held_as(info): array for info, array in held}
        infos = enumerate(jax.tree.leaves(spec.infos))
        return {at: arrays[held_as(info)] for at, info in infos if info.of_base}

    def _read(self, bound: BoundPlan, spec: ModelSpec, found: Mapping[int, jax.Array]) -> Params:
        """The parameters, but those that are there: of an adapter, and of its base."""
        infos, structure = jax.tree.flatten(spec.infos)
        shapes, found = jax.tree.leaves(param_shapes(bound, spec)), dict(found)
        reader = RecordReader(self.directory, self.step)
        places = [(reader, self.name, self.frozen)]
        if self.base is not None and not found:
            places.append((*self.base, True))
        for reader, name, frozen in places:
            prefix = f"{name}/params"
            own = [i for i, info in enumerate(infos) if info.of_base == frozen]
            wants = [
                (slot_of(stood(infos[i]), prefix, dtype=shapes[i].dtype), shapes[i].sharding)
                for i in own
            ]
            of_these = [infos[i] for i in own]
            columns = self.outliers.columns if self.outliers else None
            # What tells vectors may have been what told logits, whose head nobody needs.
            exact = not self.embeds
            arrays = read_with_codes(reader, prefix, of_these, wants, bound, columns, exact=exact)
            found.update(zip(own, arrays, strict=True))
        return jax.tree.unflatten(structure, [found[i] for i in range(len(infos))])

    def fit(
        self,
        plan: Plan,
        devices: Sequence[jax.Device] | None = None,
        *,
        make: Callable[..., Generator | Several] = Generator,
        **sizes: Any,
    ) -> Fitted:
        """The plan with as many layers on the devices as fit, in place of `offload.auto`.

        Args:
            plan: With `offload.auto`, and budgets.
            devices: Default all.
            make: What shall run: `Generator`, or `several`.
            sizes: Of that, beside model, plan and parameters.

        Raises:
            PlanError: A budget is too small, more than there is, or not known.

        Cost: one compilation of the step that generates where nothing fits, two as a rule, at
        most three. Nothing is read.
        """

        def made(plan: Plan) -> Generator | Several:
            bound, spec = self._described(plan, devices)
            return make(spec, bound, param_shapes(bound, spec), **sizes)

        return fit_layers(made, parameters_alone(plan), self.config.layers)

    def _make_model(self) -> MakeModel:
        return with_adapter(self._served(maker(self.model)), self.adapter)

    def _served(self, make_model: MakeModel) -> MakeModel:
        """The same, its matrices kept as is asked."""
        count = self.outliers.count if self.outliers else 0
        grid_of = KeptGrids(*self.origin) if self.weights == KEPT else None
        return with_served(make_model, self.weights, outliers=count, grid_of=grid_of)

    def _described(
        self, plan: Plan, devices: Sequence[jax.Device] | None
    ) -> tuple[BoundPlan, ModelSpec]:
        if self.weights != "own":  # in codes already: no history of a step in float8 is kept
            precision = dataclasses.replace(plan.precision, matmul="compute")
            plan = plan.replace(precision=precision)
        bound = plan.bind(devices)
        with use(bound):
            spec = describe(self._make_model())
        if self.outliers is not None:
            self.outliers.check(jax.tree.leaves(spec.infos))
        if any(uneven_layers(bound, info) for info in jax.tree.leaves(spec.infos)):
            bound = bound.replace(rules=one_stack(plan.rules))
        validate(bound, spec.infos)
        return bound, spec


_KINDS = {MODEL: dict, "models": dict, "tokenizer": str, "plan": dict, "adapter": dict}
"""Of the documents that are read."""


def open_checkpoint(
    path: str | Path,
    name: str = MODEL,
    *,
    step: int | None = None,
    base: str | Path | None = None,
) -> StoredModel:
    """Read a checkpoint's documents.

    Args:
        path: Folder of a run, of checkpoints (the latest is taken), or of one step.
        name: Which model, where it holds several: its configuration is then in the document
            `models` under this name.
        step: Which checkpoint of a folder of several; None is the latest.
        base: Of an adapter: where the checkpoint that it was trained beside is now; None: where it
            was.

    Raises:
        CheckpointError: There is none, it is damaged, names no model of ours, or its tokenizer
            does not fit the model.
    """
    reader = find_checkpoint(path, step)
    directory = reader.directory
    documents = reader.documents()
    for document, kind in _KINDS.items():
        reader.document(document, kind)
    where = f"checkpoint '{directory}' step {reader.step}"
    model = config_from_json(configuration_of(documents, name, where))
    # What is named beside it is whole.
    adapter, beside = documents.get("adapter") if name == MODEL else None, None
    if adapter is not None:
        if learned_head(reader):
            raise InputError(
                f"{where} is of an adapter and of a head that learned beside it; give the model"
                " that colossax export --merge --as-checkpoint writes"
            )
        beside = base_of(reader, base)
    tokenizer = tokenizer_of(documents.get("tokenizer"), model.decoder().vocab, where)
    return StoredModel(
        directory=directory,
        step=reader.step,
        model=model,
        precision=precision_of(*(beside or (reader, name)), documents),
        tokenizer=tokenizer,
        name=name,
        adapter=from_json(AdapterConfig, adapter or {}, where="adapter of the checkpoint"),
        base=beside,
    )


def load(
    path: str | Path,
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LoadedModel:
    """A checkpoint's model on devices: `open_checkpoint(path).load(plan, devices)`.

    `load(path).generator().generate(prompt)` continues a prompt.

    Raises:
        InputError: As `open_checkpoint` and `StoredModel.load`.
    """
    return open_checkpoint(path).load(plan, devices)
