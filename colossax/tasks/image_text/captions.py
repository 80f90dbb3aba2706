"""Captions of images with labels, as bytes, and batches of both."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from colossax.tasks.image_text.templates import END, TEMPLATES
from colossax.tasks.images import SplitImages
from colossax.typing import MATCHES, Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captioned:
    """Images of a run with a caption each.

    Templates of captions take turns from row to row, so that a batch is a function of its number.

    Attributes:
        split: The images.
        names: Of their classes, in words.
        length: Tokens of a row.
        causal: Whether the encoder of texts is: what fills a row up is no text then.
    """

    split: SplitImages
    names: Sequence[str]
    length: int
    causal: bool

    def batches(self, start: int) -> Iterator[Batch]:
        """Endless global batches from number `start` on."""
        for number, batch in enumerate(self.split.batches(start), start):
            labels = batch.pop("labels")
            rows = number * len(labels) + np.arange(len(labels))
            texts = [
                TEMPLATES[row % len(TEMPLATES)].format(self.names[label])
                for row, label in zip(rows.tolist(), labels.tolist(), strict=True)
            ]
            yield {**batch, **encoded(texts, self.length, causal=self.causal)}

    def validation(self) -> Iterator[Batch]:
        """Batches of what is held out, beside the caption of each class in the first rows.

        `matches` has the row of each image's caption; rows behind the captions are no text.
        """
        texts = encoded(self.class_captions, self.length, causal=self.causal)
        for batch in self.split.validation():
            labels = batch.pop("labels")
            missing = ((0, len(labels) - len(self.names)), (0, 0))
            rows = {
                name: np.pad(x, missing, constant_values=-1 if name == "segments" else END)
                for name, x in texts.items()
            }
            yield {**batch, **rows, MATCHES: labels}

    @property
    def class_captions(self) -> list[str]:
        """By which classes are told."""
        return [TEMPLATES[0].format(name) for name in self.names]

    @property
    def fingerprint(self) -> str:
        """Hash of all captions."""
        told = "\n".join(template.format(name) for template in TEMPLATES for name in self.names)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def encoded(
    texts: Sequence[str], length: int, *, causal: bool
) -> dict[str, Int32[np.ndarray, "t s"]]:
    """Texts as rows of bytes, each filled up with `END`, of which the first ends it.

    Args:
        texts: Each of fewer bytes than a row has tokens.
        length: Tokens of a row.
        causal: Whether `segments` are -1 behind a text's end; else its row is the text.
    """
    tokens = np.full((len(texts), length), END, np.int32)
    segments = np.zeros((len(texts), length), np.int32)
    for row, text in enumerate(texts):
        spelt = text.encode()
        tokens[row, : len(spelt)] = list(spelt)
        segments[row, len(spelt) + 1 :] = -1 if causal else 0
    return {"tokens": tokens, "segments": segments}
