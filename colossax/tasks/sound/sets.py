"""Sets of sound by name, and whether a configuration can be trained on one."""

import dataclasses
from typing import TYPE_CHECKING, Any

from colossax.config import nearest
from colossax.errors import InputError

if TYPE_CHECKING:
    from colossax.tasks.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSet:
    """Sizes of a set of sounds and texts.

    Attributes:
        frames: Of a sound, 10 ms each.
        written: Tokens of a text, with the one that ends it.
        names: Tokens that there are beside those that a text begins and ends with, from 0.
        told: Of it, for people.
    """

    frames: int
    written: int
    names: int
    told: str


SOUND_SETS = {
    "tones": SoundSet(frames=64, written=8, names=12, told="notes played one after another")
}
"""By the name that `data.audio` has."""


def check_sound_name(audio: str) -> None:
    """Refuse a set that there is not.

    Raises:
        InputError: With the nearest name.
    """
    if audio not in SOUND_SETS:
        raise InputError(f"data.audio: unknown '{audio}'{nearest(audio, SOUND_SETS)}")


def reads_sound(model: Any) -> bool:
    """Whether a family's configuration is of a model whose encoder reads sound."""
    encoder = getattr(model, "encoder", None)
    return encoder is not None and encoder().frames is not None


def check_sound(config: "TrainConfig") -> None:
    """Refuse what a run on sound cannot be.

    Raises:
        InputError: The model reads something else or less, or text is asked for beside sound.
    """
    data, model = config.data, config.model
    assert data.audio is not None
    sounds = SOUND_SETS[data.audio]
    if not reads_sound(model):
        raise InputError(
            f"data.audio: '{data.audio}' is sound, {sounds.told}, and the model reads none; leave"
            " it out, or start from a recipe of sound, as whisper_tones"
        )
    decoder = model.decoder()
    if 2 * decoder.longest_source < sounds.frames:
        raise InputError(
            f"model.max_source: found {decoder.longest_source}, and a sound of '{data.audio}' has"
            f" {sounds.frames} frames, of which two are a token; give {sounds.frames // 2} or more"
        )
    if not data.seq_len == sounds.written <= decoder.max_seq:
        raise InputError(
            f"data.seq_len: found {data.seq_len} of {decoder.max_seq}, and a text of"
            f" '{data.audio}' has {sounds.written} tokens; give that, and model.max_seq as many"
        )
    if len({decoder.start, decoder.eos} - {None, *range(sounds.names)}) < 2:
        raise InputError(
            f"model.start: found {decoder.start}, and {decoder.eos} as model.eos; names of"
            f" '{data.audio}' are 0 to {sounds.names - 1}, so give two others to begin and end with"
        )
    _check_no_text(config)


def _check_no_text(config: "TrainConfig") -> None:
    data = config.data
    asked = {
        "data.path": data.path,
        "data.mixture": data.mixture,
        "data.tokenizer": data.tokenizer,
        "data.tokenizer_vocab": data.tokenizer_vocab,
        "data.masking": data.masking,
        "data.spans": data.spans,
        "data.images": data.images,
        "data.packing": data.packing != "packed",
        "sample.prompt": config.sample.prompt,
    }
    odd = [name for name, value in asked.items() if value]
    if odd:
        raise InputError(
            f"{odd[0]}: it is of something else, and the run is on sound, '{data.audio}'; leave it"
            " out"
        )
