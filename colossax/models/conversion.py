"""Tables that say how a family's parameters and configuration are called and laid out elsewhere.

A family's `convert.py` holds one `Conversion`: which foreign tensor holds which of our parameters,
with its dims in which order, and which foreign setting is which of our fields. Both directions
follow from it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from colossax.config.bounds import field_hints
from colossax.errors import InputError
from colossax.models.layouts import PART, Layout
from colossax.models.settings import (
    FILE,
    REQUIRED,
    ROWS,
    TOKENS,
    Form,
    Setting,
    checked,
    form_of,
    head_of,
    labels_of,
    pad_of,
    unread_with,
)
from colossax.models.settings import setting as setting
from colossax.models.settings import settings_with as settings_with
from colossax.nn.config import HeadConfig
from colossax.typing import ParamInfo

BLOCK_BYTES = 64_000_000
_LAYER, _EXPERT, _EXPERTS = "{layer}", "{expert}", "experts"
_STACK = "layers/"


@dataclasses.dataclass(frozen=True)
class Link:
    """One foreign tensor and the parameters it holds; `{layer}` in its name counts layers.

    `{expert}` counts experts: then it holds one expert's part of each parameter, and its layout has
    no dim `experts`. In a stack of several kinds of layers a parameter is one of each kind that has
    it. A link whose parameters a model does not have (biases switched off, a tied head) is idle.
    """

    foreign: str
    layout: str
    ours: tuple[str, ...]


def link(foreign: str, layout: str, *ours: str) -> Link:
    """A `Link` from its parts."""
    return Link(foreign, layout, ours)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One foreign tensor of one model, and where its numbers belong.

    Attributes:
        name: Foreign name, layer number filled in.
        shape: Foreign shape.
        layer: Number of the layer among those of its kind; None outside the stack.
        infos: The parameters it holds, as the model declares them.
        layout: How they lie in it.
        expert: Whose part of them it is; None: all of a layer.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    infos: tuple[ParamInfo, ...]
    layout: Layout
    expert: int | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """Our dim names of each parameter, `layers` aside, and `experts` where it is one's."""
        return _own_dims(self.infos[0], alone=self.expert is not None)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dim of the layout."""
        return _sizes(self.infos, alone=self.expert is not None)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each parameter, `layers` aside, and `experts` where it is one's."""
        alone = self.expert is not None
        return tuple(
            tuple(self.sizes[dim] for dim in _own_dims(info, alone=alone)) for info in self.infos
        )

    @property
    def last_expert(self) -> bool:
        """Whether with it all experts of its layer are there."""
        return self.expert == _experts(self.infos[0]) - 1

    def blocks(self, itemsize: int) -> Iterator["Block"]:
        """The tensor cut along its outermost dim, in order, into blocks of about 64 MB."""
        if not self.layout.names:  # one number
            yield Block(tensor=self, rows=1, sizes={})
            return
        outer, sizes = self.layout.names[0], self.sizes
        apart = outer == PART or self.layout.unlike is not None
        if apart or outer not in self.layout.groups[0]:
            yield Block(tensor=self, rows=self.shape[0], sizes=sizes)
            return
        entry_bytes = itemsize * math.prod(self.shape) // sizes[outer]
        step = max(1, BLOCK_BYTES // max(1, entry_bytes))
        entry_rows = self.shape[0] // sizes[outer]
        for first in range(0, sizes[outer], step):
            count = min(step, sizes[outer] - first)
            yield Block(
                tensor=self,
                first_row=first * entry_rows,
                rows=count * entry_rows,
                sizes={**sizes, outer: count},
                index=tuple(
                    slice(first, first + count) if dim == outer else slice(None)
                    for dim in self.dims
                ),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of a foreign tensor, which are a slice of each parameter it holds.

    Attributes:
        first_row, rows: Its rows of the foreign tensor, contiguous in a file.
        sizes: Size of each dim of the layout within the block.
        index: Its slice of each parameter; `...` is all.
    """

    tensor: Tensor
    rows: int
    sizes: Mapping[str, int]
    first_row: int = 0
    index: Any = ...

    def ours(self, foreign: np.ndarray) -> list[np.ndarray]:
        """The slice of each parameter, as views of the rows."""
        return self.tensor.layout.ours(foreign, self.tensor.dims, self.sizes)

    def foreign(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """The rows, from whole parameters."""
        return self.tensor.layout.foreign([a[self.index] for a in ours], self.tensor.dims)


def _own_dims(info: ParamInfo, *, alone: bool = False) -> tuple[str, ...]:
    dims = tuple(str(dim).split(":")[0] for dim in info.dims[1 if info.stacked else 0 :])
    return tuple(dim for dim in dims if not (alone and dim == _EXPERTS))


def _sizes(infos: Sequence[ParamInfo], *, alone: bool) -> dict[str, int]:
    sizes: dict[str, int] = {PART: len(infos)}
    for info in infos:
        of_dims = zip(_own_dims(info), info.shape[info.stacked :], strict=True)
        sizes |= {dim: size for dim, size in of_dims if not (alone and dim == _EXPERTS)}
    return sizes


def _experts(info: ParamInfo) -> int:
    return info.shape[info.dims.index(_EXPERTS)]


_SCORE = (
    link("score.weight", "outputs embed", "answers/map/w"),
    link("score.bias", "outputs", "answers/map/b"),
)

DECODER_FORMS = {
    ROWS: Form(
        head=lambda _, outputs: HeadConfig(outputs=outputs, pool="last", bias=False), links=_SCORE
    ),
    TOKENS: Form(head=lambda _, outputs: HeadConfig(outputs=outputs), links=_SCORE),
}
"""Those of `transformers` for most decoders: a map of the last token of a row, or of each."""

CLASSIFIER_FORMS = {
    **DECODER_FORMS,
    TOKENS: Form(
        head=DECODER_FORMS[TOKENS].head,
        links=tuple(
            dataclasses.replace(one, foreign=one.foreign.replace("score", "classifier"))
            for one in _SCORE
        ),
    ),
}
"""Of GPT-2 and BLOOM, which call that of each token otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model family's names elsewhere.

    Attributes:
        model_type: The family's `model_type` in config.json.
        architecture: Class that reads the export.
        forms: Other heads, by the end of the class's name that has them.
        config: Our configuration class.
        settings: Settings that are our fields.
        fixed: Settings with the one value our models have (the first); others are refused.
        links: Tensors.
        links_of: Those of one configuration, where they differ.
        prefix: Beginning of tensor names that some files leave out.
        head: Name of the output matrix, which some files hold though it is the embedding table.
        spelt: Ends of older names, and what they are now.
        constant: Tensors that the class has and we have not, as nothing that we run reads them: the
            parameter that each is like, and the number that it is filled with.
        begun: Beginnings of other names, and what they are here; the first that fits counts.
        ignored: Patterns of tensors that hold no parameters, such as saved masks.
        packed: Whether experts' matrices may be stored as MXFP4; they are read as bfloat16.
        read, write: Settings that are no plain field: `read(settings) -> our fields`,
            `write(config) -> settings`.
    """

    model_type: str
    architecture: str
    config: type
    settings: tuple[Setting, ...]
    links: tuple[Link, ...]
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    forms: Mapping[str, Form] = dataclasses.field(default_factory=lambda: DECODER_FORMS)
    prefix: str = ""
    head: str = "lm_head.weight"
    spelt: Mapping[str, str] = dataclasses.field(default_factory=dict)
    begun: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constant: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    links_of: Callable[[Any], tuple[Link, ...]] | None = None
    packed: bool = False
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}

    @property
    def lone_experts(self) -> bool:
        """Whether each expert of a layer has tensors of its own."""
        return any(_EXPERT in entry.foreign for entry in self.links)

    def of(self, config: Any) -> "Conversion":
        """With the tensors of this configuration."""
        links = self.links if self.links_of is None else self.links_of(config)
        ignored, head = self.ignored, getattr(config, "head", None)
        if head is not None:
            ignored = (*ignored, *unread_with(head, links))
            links = (*links, *self._form(config)[1].links)
        return dataclasses.replace(self, links=links, ignored=ignored, links_of=None)

    def _form(self, config: Any) -> tuple[str, Form]:
        """The class that has the head of this configuration, and its form."""
        settings = {**self._plain_settings(config), **labels_of(config.head)}
        return form_of(self.forms, self.architecture, settings, config.head)

    def config_from(self, settings: Mapping[str, Any]) -> Any:
        """Our configuration of the settings in config.json.

        Raises:
            InputError: A setting is missing, of a wrong type, or asks for what the model has not.
        """
        for name, allowed in self.fixed.items():
            if settings.get(name, allowed[0]) not in allowed:
                raise InputError(
                    f"config.json: {self.model_type} with {name} = {settings[name]!r} is not"
                    f" supported; only {' or '.join(map(repr, allowed))} is"
                )
        hints = field_hints(self.config)
        fields = {s.ours: _value(s, settings, hints[s.ours]) for s in self.settings}
        later = {
            "head": head_of(self.forms, self.architecture, settings),
            "pad": pad_of(settings),
        }
        fields |= {name: value for name, value in later.items() if name in hints}
        try:
            return self.config(**{**fields, **self.read(settings)})
        except InputError as problem:
            raise InputError(f"config.json: {str(problem).removeprefix(FILE)}") from None

    def settings_of(self, config: Any) -> dict[str, Any]:
        """What config.json holds for our configuration, its weights' type aside.

        Raises:
            InputError: The format has no place for the configuration's head.
        """
        plain = self._plain_settings(config)
        if getattr(config, "head", None) is None:
            return plain
        return {**plain, **labels_of(config.head), "architectures": [self._form(config)[0]]}

    def _plain_settings(self, config: Any) -> dict[str, Any]:
        mapped = {s.foreign[0]: getattr(config, s.ours) for s in self.settings}
        optional = {s.foreign[0] for s in self.settings if s.default is None}
        mapped = {name: v for name, v in mapped.items() if not (v is None and name in optional)}
        fixed = {name: allowed[0] for name, allowed in self.fixed.items()}
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        filled = getattr(config, "pad", None)
        pad = {} if filled is None else {"pad_token_id": filled}
        return {**head, **fixed, **mapped, **self.write(config), **pad}

    def tensors(self, infos: Mapping[str, ParamInfo], kinds: Sequence[str] = ()) -> list[Tensor]:
        """All foreign tensors of a model, in the table's order, layer after layer.

        Args:
            infos: Parameters by path; the stack as one segment.
            kinds: Of each layer; none where all are of one.
        """
        active = [entry for entry in self.links if _held(entry, infos, kinds)]
        covered = [path for entry in active for path in _held(entry, infos, kinds)]
        assert sorted(covered) == sorted(infos), set(covered) ^ set(infos)
        found: list[Tensor] = []
        stacks = dict.fromkeys(stack for stack in map(_stack_of, active) if stack is not None)
        for entry in active:
            stack = _stack_of(entry)
            if stack is None:
                found.append(_tensor(entry, infos))
            elif stack in stacks:
                del stacks[stack]
                own = [one for one in active if _stack_of(one) == stack]
                layers = len(kinds) or infos[entry.ours[0]].total_layers or 0
                found += [
                    tensor
                    for number in range(layers)
                    for one in own
                    for tensor in _layer_tensors(one, infos, kinds, number)
                ]
        return found


def _stack_of(entry: Link) -> str | None:
    """What stands before `layers` in the path of a layer's parameters; None: they are of none."""
    return entry.ours[0].partition(_STACK)[0] if _LAYER in entry.foreign else None


def _of_kind(entry: Link, kind: str) -> Link:
    """The link with its parameters as layers of a kind have them."""
    ours = tuple(
        f"{_STACK}{kind}/{path.removeprefix(_STACK)}" if path.startswith(_STACK) else path
        for path in entry.ours
    )
    return dataclasses.replace(entry, ours=ours)


def _held(entry: Link, infos: Mapping[str, ParamInfo], kinds: Sequence[str]) -> list[str]:
    """Paths of the parameters of a link that the model has."""
    forms = dict.fromkeys([_of_kind(entry, kind) for kind in kinds] or [entry])
    return [path for form in forms if form.ours[0] in infos for path in form.ours]


def _layer_tensors(
    entry: Link, infos: Mapping[str, ParamInfo], kinds: Sequence[str], number: int
) -> Iterator[Tensor]:
    """The tensors of a link that a layer has."""
    row = number
    if kinds:
        entry, row = _of_kind(entry, kinds[number]), list(kinds[:number]).count(kinds[number])
    if entry.ours[0] not in infos:
        return
    alone = _EXPERT in entry.foreign
    for expert in range(_experts(infos[entry.ours[0]])) if alone else (None,):
        yield _tensor(entry, infos, number, row, expert)


def _tensor(
    entry: Link,
    infos: Mapping[str, ParamInfo],
    number: int | None = None,
    row: int | None = None,
    expert: int | None = None,
) -> Tensor:
    entry_infos = tuple(infos[path] for path in entry.ours)
    layout = Layout(entry.layout)
    return Tensor(
        name=entry.foreign.replace(_LAYER, str(number)).replace(_EXPERT, str(expert)),
        shape=layout.shape(_sizes(entry_infos, alone=expert is not None)),
        layer=row,
        infos=entry_infos,
        layout=layout,
        expert=expert,
    )


def _value(entry: Setting, settings: Mapping[str, Any], hint: Any) -> Any:
    name = next((name for name in entry.foreign if name in settings), None)
    if name is None:
        if entry.default is REQUIRED:
            raise InputError(f"config.json: '{entry.foreign[0]}' is missing; add it to config.json")
        return entry.default(settings) if callable(entry.default) else entry.default
    value = settings[name]
    if value is None and callable(entry.default):
        return entry.default(settings)
    return checked(name, value, hint)
