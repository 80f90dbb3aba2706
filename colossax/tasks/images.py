"""Images with labels: what is trained on and what is held out, and batches of either."""

import dataclasses
import hashlib
import importlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int32

from colossax.data.hashing import keyed_permutation
from colossax.errors import InputError
from colossax.tasks.config import DataConfig
from colossax.typing import PIXELS, Batch

_HELD_OUT_KEY, _ORDER_KEY = 1, 2
"""Set the draw of what is held out apart from the order of the rest."""

NO_LABEL = -1
"""Of rows that fill a batch up: no loss counts them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """Images, each with the number of its class.

    Attributes:
        pixels: `[n, height, width, channels]`, from 0 to 1.
        labels: `[n]`.
    """

    pixels: Float32[np.ndarray, "n h w c"]
    labels: Int32[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Hash of pixels and labels."""
        told = hashlib.sha256(str(self.pixels.shape).encode())
        told.update(self.pixels.tobytes() + self.labels.tobytes())
        return told.hexdigest()[:16]

    @property
    def class_entropy(self) -> float:
        """Loss, in nats per image, of the best model that knows frequencies of classes alone."""
        shares = np.unique(self.labels, return_counts=True)[1] / len(self)
        return float(-(shares * np.log(shares)).sum())

    def of(self, numbers: np.ndarray) -> "Images":
        """Those of these numbers, in their order."""
        return Images(pixels=self.pixels[numbers], labels=self.labels[numbers])

    def batch(self) -> Batch:
        """As a global batch."""
        return {PIXELS: self.pixels, "labels": self.labels}


def read_images(name: str) -> Images:
    """A set of images by its name, see `IMAGE_SETS`.

    Raises:
        InputError: What ships it is not installed.
    """
    assert name == "digits"
    try:
        sets = importlib.import_module("sklearn.datasets")  # an extra
    except ImportError:
        raise InputError(
            "data.images: 'digits' comes with scikit-learn, which is not installed; install it, as"
            " by pip install 'colossax[vision]'"
        ) from None
    found = sets.load_digits()
    pixels = (found.images / 16).astype(np.float32)[..., None]
    return Images(pixels=pixels, labels=found.target.astype(np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitImages:
    """Images of a run.

    Which are held out is the same for every seed; the order of the others is drawn for each epoch
    from the seed, so that a batch is a function of its number alone, on every mesh.

    Attributes:
        config: What was asked for.
        seed: Of the order.
        training: Those to train on.
        held_out: Those held out.
    """

    config: DataConfig
    seed: int
    training: Images
    held_out: Images

    @classmethod
    def of(cls, images: Images, config: DataConfig, seed: int) -> "SplitImages":
        """Split by the share that is asked for, rounded, one image at least on each side."""
        order = keyed_permutation(0, _HELD_OUT_KEY, count=len(images))
        count = min(max(1, round(len(images) * config.validation_fraction)), len(images) - 1)
        held_out, training = (images.of(np.sort(some)) for some in np.split(order, [count]))
        return cls(config=config, seed=seed, training=training, held_out=held_out)

    def batches(self, start: int) -> Iterator[Batch]:
        """Endless global batches from number `start` on."""
        rows, epoch, order = self.config.global_batch, -1, np.zeros(0, np.int64)
        number = start
        while True:
            chosen = []
            for row in range(number * rows, (number + 1) * rows):
                of_epoch, at = divmod(row, len(self.training))
                if of_epoch != epoch:
                    epoch = of_epoch
                    key = (self.seed, _ORDER_KEY, epoch)
                    order = keyed_permutation(*key, count=len(self.training))
                chosen.append(order[at])
            yield self.training.of(np.array(chosen)).batch()
            number += 1

    def validation(self) -> Iterator[Batch]:
        """Batches of what is held out, each image once, the last filled up with rows of no label.

        No more than `data.validation_batches`.
        """
        rows, count = self.config.global_batch, len(self.held_out)
        for first in range(0, min(count, rows * self.config.validation_batches), rows):
            numbers = np.arange(first, first + rows)
            batch = self.held_out.of(np.minimum(numbers, count - 1)).batch()
            yield {**batch, "labels": np.where(numbers < count, batch["labels"], NO_LABEL)}
