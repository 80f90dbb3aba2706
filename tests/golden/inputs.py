"""What golden models are given."""

import dataclasses
from typing import Any

import numpy as np
from edits import Case, Model

SEQ, PROMPT, PADDING, WRITTEN, IMAGE_ROWS = 40, 12, 4, 30, 4
TEXT_ROWS, OLDER_EOS = 3, 2
FIRST, BETWEEN = 16, 5
"""Tokens of an image that stands among words, and words before and behind the first."""

INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "pixel_values",
    "input_features",
)
Inputs = dict[str, np.ndarray]
"""`input_ids`; `attention_mask` and `token_type_ids` where rows end in padding; of pairs of texts
what is written, too. Or `pixel_values`, `[b, channels, height, width]`, or texts and those; or
`input_features`, `[b, mels, frames]`, and what is written."""


def inputs_of(case: Case, model: Model, random: np.random.RandomState) -> Inputs:
    """What a case is given: two rows, the second of which ends in padding where none generates."""
    if case.seeing:
        return images_among_words(case.sizes, random)
    if case.both:
        shown = dataclasses.replace(case, sizes=case.sizes["vision_config"])
        return {**texts_of(case.sizes["text_config"], random), **inputs_of(shown, model, random)}
    if case.images:
        height, width = sizes_of(case.sizes["image_size"])
        shape = (IMAGE_ROWS, case.sizes["num_channels"], height, width)
        return {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    if case.sound:
        shape = (2, case.sizes["num_mel_bins"], 2 * case.sizes["max_source_positions"])
        frames = random.standard_normal(shape).astype(np.float32)
        written = random.randint(0, case.sizes["vocab_size"], (2, WRITTEN))
        return {"input_features": frames, "decoder_input_ids": written.astype(np.int32)}
    ids = random.randint(0, case.sizes["vocab_size"], (2, SEQ)).astype(np.int32)
    if case.generates:
        return {"input_ids": ids}
    pad, mask = model.config.pad_token_id, np.ones_like(ids)
    ids[ids == pad] = pad + 1
    ids[1, -PADDING:], mask[1, -PADDING:] = pad, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if case.pair:
        written = random.randint(0, case.sizes["vocab_size"], (2, WRITTEN))
        return {**inputs, "decoder_input_ids": written.astype(np.int32)}
    kinds = getattr(model.config, "type_vocab_size", 0)
    if kinds:
        inputs["token_type_ids"] = random.randint(0, kinds, ids.shape).astype(np.int32)
    return inputs


def texts_of(sizes: dict[str, Any], random: np.random.RandomState) -> Inputs:
    """Texts that end in the token that says so, then in others, of which some have higher numbers.

    Those of which the highest number is the end have no higher ones.
    """
    eos, length = sizes.get("eos_token_id"), sizes["max_position_embeddings"]
    highest = sizes["vocab_size"] if eos != OLDER_EOS else 100
    ids = random.randint(3, highest, (TEXT_ROWS, length)).astype(np.int32)
    if eos is not None:
        ids[ids == 100] = 99
        ids[np.arange(TEXT_ROWS), [length - 1, 7, 12]] = 100
        ids[1, 10] = 100  # the first counts
    return {"input_ids": ids}


def sizes_of(size: int | list[int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def images_among_words(sizes: dict[str, Any], random: np.random.RandomState) -> Inputs:
    """Two rows of words, in each of which two images stand: in the second one in front."""
    token, image = sizes["image_token_index"], sizes["vision_config"]
    ids = random.randint(0, token, (2, SEQ + 2 * FIRST)).astype(np.int32)
    for row, starts in enumerate(((BETWEEN, 3 * BETWEEN + FIRST), (0, FIRST + 1))):
        for start in starts:
            ids[row, start : start + FIRST] = token
    shape = (4, image["num_channels"], image["image_size"], image["image_size"])
    return {"input_ids": ids, "pixel_values": random.standard_normal(shape).astype(np.float32)}
