"""The documents of a checkpoint that say what its model is."""

import dataclasses
from typing import Any

from colossax.checkpoint import RecordReader
from colossax.config import Plan, Precision, from_json
from colossax.data import Tokenizer
from colossax.errors import CheckpointError, PlanError

MODEL = "model"
"""The name of a model that is alone."""

_FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes of a plan's parameters, the widest last."""


def configuration_of(documents: dict[str, Any], name: str, where: str) -> Any:
    """Of a model's family, as JSON.

    Raises:
        CheckpointError: There is none of that name.
    """
    several = documents.get("models", {})
    if name in several:
        return several[name]
    if name != MODEL or (several and MODEL not in documents):
        raise CheckpointError(
            f"{where} names no model '{name}'; it has"
            f" {', '.join(repr(one) for one in sorted(several)) or 'one without a name'}"
        )
    if "drafter" in documents:
        raise CheckpointError(
            f"{where} holds a drafter, which continues no text by itself; give the checkpoint of"
            " the model that it drafts for"
        )
    if MODEL not in documents:
        raise CheckpointError(
            f"{where} names no model; give one that colossax train or colossax import wrote"
        )
    return documents[MODEL]


def tokenizer_of(document: str | None, vocab: int, where: str) -> Tokenizer | None:
    """That it was trained with.

    Raises:
        CheckpointError: It has more tokens than the model.
    """
    if document is None:
        return None
    tokenizer = Tokenizer.from_json(document)
    if tokenizer.vocab_size > vocab:
        raise CheckpointError(
            f"{where}: its tokenizer has {tokenizer.vocab_size} tokens and its model {vocab};"
            f" restore it from a copy"
        )
    return tokenizer


def precision_of(reader: RecordReader, name: str, documents: dict[str, Any]) -> Precision:
    """The run's, if a plan is stored, with parameters as they are on disk."""
    prefix = f"{name}/params/"
    stored = {
        dtype.name for record, (_, dtype) in reader.records().items() if record.startswith(prefix)
    }
    params = max(stored.intersection(_FLOATS), key=_FLOATS.index, default="float32")
    trained = documents.get("plan")
    if trained is None:
        return Precision(params=params, compute=params, cache=params)
    plan = from_json(Plan, trained, where="plan of the checkpoint", error=PlanError)
    # Others are of parameters that keep a dtype of their own.
    params = plan.precision.params if plan.precision.params in stored else params
    compute = plan.precision.compute
    return dataclasses.replace(plan.precision, params=params, cache=compute, matmul="compute")
