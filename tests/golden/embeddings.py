"""Vectors that `transformers` gives for texts: hidden states of a padded batch, pooled, length 1.

What `sentence-transformers` does with a model, a pooling and a normalisation, written out.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

MODELS = ("bert", "roberta", "modernbert", "llama")
FILE = "embeddings.safetensors"
LENGTHS = (40, 1, 7, 23, 40, 12)


def texts_of(vocab: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of texts and which of them are some; what fills up is on the right."""
    noise = np.random.default_rng(4)
    mask = np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]
    ids = noise.integers(4, vocab, mask.shape)
    return np.where(mask, ids, pad), mask


def vectors(target: Path) -> dict[str, np.ndarray]:
    """By model and pooling, of the texts beside them."""
    found: dict[str, np.ndarray] = {}
    for name in MODELS:
        model = transformers.AutoModel.from_pretrained(target / name, dtype=torch.float32).eval()
        ids, mask = texts_of(model.config.vocab_size, model.config.pad_token_id or 0)
        with torch.no_grad():
            hidden = model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask).long()
            ).last_hidden_state
        last = np.asarray(LENGTHS) - 1
        real = torch.from_numpy(mask)[..., None]
        pooled = {
            "mean": (hidden * real).sum(1) / real.sum(1),
            "first": hidden[:, 0],
            "last": hidden[torch.arange(len(last)), torch.from_numpy(last)],
        }
        found[f"{name}/ids"] = ids.astype(np.int32)
        for pool, vector in pooled.items():
            unit = torch.nn.functional.normalize(vector, dim=-1)
            found[f"{name}/{pool}"] = unit.numpy()
    found["lengths"] = np.asarray(LENGTHS, np.int32)
    return found
