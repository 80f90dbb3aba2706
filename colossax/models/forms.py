"""Forms in which a family's files hold another head than that of its vocabulary.

Each is a class of `transformers` that config.json names under `architectures`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from colossax.config import Count, to_json
from colossax.errors import InputError
from colossax.models.settings import checked
from colossax.nn.config import HeadConfig

if TYPE_CHECKING:
    from colossax.models.conversion import Link

ROWS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
"""Ends of the classes' names."""

_OF_VOCABULARY = ("", "Model", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining")
_USUAL_OUTPUTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One such form.

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
    had = [to_json(form.head(settings, head.outputs or _USUAL_OUTPUTS)) for form in forms.values()]
    raise InputError(
        f"{settings['model_type']} config: head {to_json(head)} cannot be exported; the format has"
        f" only {' or '.join(map(str, had))}"
    )


def labels_of(head: HeadConfig) -> dict[str, Any]:
    """How config.json says the number of outputs."""
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
