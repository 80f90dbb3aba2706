"""What golden models are given."""

import dataclasses
from typing import Any

import numpy as np
import torch
from edits import Case, Model

SEQ, PROMPT, PADDING, WRITTEN, IMAGE_ROWS = 40, 12, 4, 30, 4
TEXT_ROWS, OLDER_EOS = 3, 2
FIRST, BETWEEN = 16, 5
"""Tokens of an image that stands among words, and words before and behind the first."""

SHOWN = {"llava": (8, 8), "qwen2_vl": (8, 12)}
"""Height and width of the images that a family is given."""

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
    newer = "image_token_id" in sizes
    token = sizes["image_token_id" if newer else "image_token_index"]
    height, width = SHOWN["qwen2_vl" if newer else "llava"]
    places, words = (height * width // 16, 120) if newer else (FIRST, token)
    ids = random.randint(0, words, (2, SEQ + 2 * FIRST)).astype(np.int32)
    for row, starts in enumerate(((BETWEEN, 3 * BETWEEN + FIRST), (0, FIRST + 1))):
        for start in starts:
            ids[row, start : start + places] = token
    pixels = random.standard_normal((4, 3, height, width)).astype(np.float32)
    return {"input_ids": ids, "pixel_values": pixels}


def as_asked(model: Model, inputs: Inputs) -> dict[str, torch.Tensor]:
    """What a model that reads images among words is given: Qwen2-VL's patches, square by square."""
    pixels = torch.from_numpy(inputs["pixel_values"]).to(model.dtype)
    if model.config.model_type != "qwen2_vl":
        return {"pixel_values": pixels}
    image, ids = model.config.vision_config, torch.from_numpy(inputs["input_ids"])
    count, channels, height, width = pixels.shape
    size, side = image.patch_size, image.spatial_merge_size
    rows, columns = height // size, width // size
    frames = pixels[:, None].repeat(1, image.temporal_patch_size, 1, 1, 1)
    cut = frames.reshape(
        *(count, image.temporal_patch_size, channels),
        *(rows // side, side, size, columns // side, side, size),
    )
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * rows * columns, -1)
    return {
        "pixel_values": cut,
        "image_grid_thw": torch.tensor([[1, rows, columns]] * count),
        "mm_token_type_ids": (ids == model.config.image_token_id).long(),
    }
