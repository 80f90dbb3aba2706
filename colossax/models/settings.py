"""What a Hugging Face config.json says, read with care: types, bounds, kinds of layers, heads."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colossax.config import Count, Natural, to_json
from colossax.config.bounds import split_hint
from colossax.errors import InputError
from colossax.nn.config import HeadConfig

if TYPE_CHECKING:
    from colossax.models.conversion import Link

REQUIRED = object()

FILE = "config.json: "
"""Refusals begin with it."""

FULL, LOCAL = "full_attention", "sliding_attention"
"""Values of `layer_types`."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A foreign setting that is one of our fields.

    Attributes:
        ours: Field of our configuration.
        foreign: Its name elsewhere, then older names that are read too.
        default: Value where it is missing; a function of the settings when it depends on others.
    """

    ours: str
    foreign: tuple[str, ...]
    default: Any = REQUIRED


def setting(ours: str, *foreign: str, default: Any = REQUIRED) -> Setting:
    """A `Setting` from its parts."""
    return Setting(ours, foreign, default)


def settings_with(base: Sequence[Setting], *own: Setting) -> tuple[Setting, ...]:
    """Those of a base and a family's own, which stand in place of those of the same field."""
    fields = {one.ours for one in own}
    return (*(one for one in base if one.ours not in fields), *own)


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the type and within its bounds, integers taken for floats too.

    Raises:
        InputError: It is of another type, or out of bounds.
    """
    unions = (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if typing.get_origin(hint) in unions else (hint,)
    wanted = dict(split_hint(part) for part in parts)
    if type(value) is int and int not in wanted and float in wanted:
        value = float(value)
    if type(value) not in wanted:
        kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
        raise InputError(f"config.json: '{name}' is {value!r}; it must be {kinds}")
    bound = wanted[type(value)]
    if bound is not None:
        bound.check(value, f"config.json: '{name}'")
    return value


def first_eos(settings: Mapping[str, Any]) -> dict[str, int | None]:
    """Our `eos`: of several tokens that end a text, the first."""
    value = settings.get("eos_token_id")
    if isinstance(value, list):
        value = value[0] if value else None
    return {"eos": checked("eos_token_id", value, Natural | None)}


def every_full(name: str, full: list[bool], remedy: str, does: str = "see all keys") -> int:
    """Our `full_every`: of which so many-th layers those are that see all keys; 0: none does.

    Args:
        name: Of the setting that says so.
        full: Of each layer.
        remedy: What is supported.
        does: What they do.

    Raises:
        InputError: They are no each so many-th.
    """
    if not any(full):
        return 0
    every = full.index(True) + 1
    if full != [(at + 1) % every == 0 for at in range(len(full))]:
        first = [at for at, one in enumerate(full) if one][:5]
        raise InputError(
            f"config.json: {name} with layers {', '.join(map(str, first))} that {does} are"
            f" not supported; only {remedy} is"
        )
    return every


def per_layer(settings: Mapping[str, Any], name: str, known: tuple[Any, ...]) -> list | None:
    """A setting that has a value for each layer, or None where it is missing.

    Raises:
        InputError: It is no list of as many as layers, or holds another value than those known.
    """
    found = checked(name, settings.get(name), list | None)
    if not found:
        return None
    layers = settings.get("num_hidden_layers")
    if len(found) != layers:
        raise InputError(
            f"config.json: {name} has {len(found)} entries for {layers} layers; give one for each"
        )
    for value in found:
        if value not in known:
            raise InputError(
                f"config.json: {name} with {value!r} is not supported; only"
                f" {' or '.join(map(repr, known))} is"
            )
    return found


def write_kinds(full: Sequence[bool], other: str = LOCAL) -> list[str]:
    """The setting `layer_types` of layers of which some see all keys."""
    return [FULL if one else other for one in full]


def unsupported_window(settings: Mapping[str, Any]) -> None:
    """Refuse Qwen models that slide a window in some of their layers.

    Raises:
        InputError: They do.
    """
    kinds = checked("layer_types", settings.get("layer_types"), list | None)
    sliding = LOCAL in (kinds or ())
    if settings.get("use_sliding_window") or sliding:
        raise InputError(
            "config.json: a sliding window in some layers is not supported; only"
            " use_sliding_window = false with full attention in all layers is"
        )


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Their names and ours, the one that is written first."""


def read_activation(settings: Mapping[str, Any], name: str, default: str) -> str:
    """Our name of a family's activation.

    Raises:
        InputError: It is another.
    """
    found = checked(name, settings.get(name, default), str)
    if found not in _ACTIVATIONS:
        raise InputError(
            f"config.json: {name} = {found!r} is not supported; only"
            f" {' or '.join(map(repr, _ACTIVATIONS))} is"
        )
    return _ACTIVATIONS[found]


def write_activation(ours: str, usual: str = "") -> str:
    """Theirs of our name, the usual one where that is it."""
    if _ACTIVATIONS.get(usual) == ours:
        return usual
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)


ROWS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
IMAGES = "ForImageClassification"
"""Ends of the names of classes with other heads, which config.json has under `architectures`."""

_OF_VOCABULARY = ("", "Model", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining")
_OF_VOCABULARYS_HEAD = ("head/", "head_bias", "transform/")
_USUAL_OUTPUTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A class of `transformers` in which a family has another head than that of its vocabulary.

    Attributes:
        head: Our head, of the settings and the number of outputs.
        links: Tensors of the head.
    """

    head: Callable[[Mapping[str, Any], int], HeadConfig]
    links: "tuple[Link, ...]"


def head_of(
    forms: Mapping[str, Form], architecture: str, settings: Mapping[str, Any]
) -> HeadConfig | None:
    """The head that config.json asks for; None: that of the vocabulary.

    Args:
        forms: Of the family, by the end of the class's name.
        architecture: Class of the family with the head of the vocabulary.
        settings: Of config.json.

    Raises:
        InputError: It names a class of the family with a head that there is not.
    """
    named = checked("architectures", settings.get("architectures"), list | None) or [architecture]
    known, end = [*map(_end, [architecture]), *forms], _end(str(named[0]))
    if end in forms:
        return forms[end].head(settings, _outputs(settings))
    if end.startswith("For") and end not in (*known, *_OF_VOCABULARY):
        raise InputError(
            f"config.json: {settings.get('model_type')} with architectures = {named!r} is not"
            f" supported; only classes that end in {' or '.join(known)} are"
        )
    return None


def form_of(
    forms: Mapping[str, Form], architecture: str, settings: Mapping[str, Any], head: HeadConfig
) -> tuple[str, Form]:
    """The class that has such a head, and its form.

    Args:
        forms: Of the family.
        architecture: See `head_of`.
        settings: What config.json is to hold.
        head: Ours.

    Raises:
        InputError: No class has it.
    """
    for end, form in forms.items():
        if form.head(settings, head.outputs or _USUAL_OUTPUTS) == head:
            return architecture.removesuffix(_end(architecture)) + end, form
    if tells_hidden_states(head) and "vocab_size" in settings:
        bare = architecture.removesuffix(_end(architecture)) + "Model"
        return bare, Form(head=lambda _settings, _outputs: head, links=())
    had = [to_json(form.head(settings, head.outputs or _USUAL_OUTPUTS)) for form in forms.values()]
    raise InputError(
        f"{settings['model_type']} config: head {to_json(head)} cannot be exported; the format has"
        f" only {' or '.join(map(str, had))}"
    )


def tells_hidden_states(head: HeadConfig) -> bool:
    """Whether a head pools and has no parameters: such a model is a class without any head."""
    pooled = head.pool is not None and head.pool != "attention"
    return pooled and head.outputs is None and head.transform is None


def unread_with(head: HeadConfig, links: "Sequence[Link]") -> list[str]:
    """Patterns of tensors that a model with this head need not have and its files may.

    Those of a vocabulary's head, which embeddings are often told in place of.
    """
    if not tells_hidden_states(head):
        return []
    return [re.escape(one.foreign) for one in links if one.ours[0].startswith(_OF_VOCABULARYS_HEAD)]


def labels_of(head: HeadConfig) -> dict[str, Any]:
    """How config.json says the number of outputs, where there is one."""
    if head.outputs is None:
        return {}
    names = {str(at): f"LABEL_{at}" for at in range(head.outputs or 0)}
    return {"id2label": names, "label2id": {name: int(at) for at, name in names.items()}}


def _outputs(settings: Mapping[str, Any]) -> int:
    labels = checked("id2label", settings.get("id2label"), dict | None)
    said = settings.get("num_labels", _USUAL_OUTPUTS)
    return len(labels) if labels else checked("num_labels", said, Count)


def _end(name: str) -> str:
    """`ForMaskedLM` of `BertForMaskedLM`."""
    found = re.search(r"(For[A-Z]\w*|LMHeadModel|Model)$", name)
    return found[0] if found else ""


def pad_of(settings: Mapping[str, Any]) -> int | None:
    """The token that fills rows up; None where none of the vocabulary is said."""
    said, vocab = settings.get("pad_token_id"), settings.get("vocab_size")
    return said if type(said) is int and type(vocab) is int and 0 <= said < vocab else None
