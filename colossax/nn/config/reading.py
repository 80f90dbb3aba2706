"""What a model reads, tokens of a vocabulary or something in their place, checked."""

from typing import TYPE_CHECKING

from colossax.errors import InputError

if TYPE_CHECKING:
    from colossax.nn.config.decoder import DecoderConfig


def reads_text_alone(config: "DecoderConfig") -> bool:
    """Whether a model reads one row of tokens, and no images, sound or text of a source."""
    parts = config.patches, config.frames, config.longest_source
    return bool(config.vocab) and all(part is None for part in parts)


def check_reads(config: "DecoderConfig") -> None:
    """Refuse a model that reads nothing, or several things.

    Raises:
        InputError: That, or parts that do not go with what it reads.
    """
    given = {"patches of images": config.patches, "frames of sound": config.frames}
    found = [name for name, part in given.items() if part is not None]
    if len(found) + bool(config.vocab) != 1:
        raise InputError(
            f"model.vocab: found {config.vocab} and {' and '.join(found) or 'no patches'}; give the"
            " tokens of a vocabulary, or vocab 0 and patches, or frames"
        )
    if config.patches is not None:
        _check_images(config)
    if config.frames is not None:
        _check_sound(config)


def _check_images(config: "DecoderConfig") -> None:
    assert config.patches is not None
    if config.head is None:
        raise InputError(
            "model.head: a model of images has no vocabulary to tell; give head, as"
            " HeadConfig(pool='first') for the class token's hidden state"
        )
    if config.patches.any_size and (config.learned_positions or config.rope is None):
        raise InputError(
            "model.patches.any_size: images of other sizes have other positions, and those here are"
            " learned; give rope, and learned_positions 0"
        )
    odd, tokens = _of_tokens(config), config.patches.tokens
    if odd or config.causal or config.max_seq != tokens:
        raise InputError(
            f"model.patches: {', '.join(odd) or 'causal or another max_seq'} beside patches;"
            f" images are of no kinds or width of tokens and no experts, their attention is not"
            f" causal, and max_seq is their {tokens} tokens; leave the others out"
        )


def _check_sound(config: "DecoderConfig") -> None:
    odd = _of_tokens(config)
    if odd or config.causal:
        raise InputError(
            f"model.frames: {', '.join(odd) or 'causal'} beside frames; sound is of no kinds or"
            " width of tokens and no experts, and its attention is not causal; leave the others out"
        )


def _of_tokens(config: "DecoderConfig") -> list[str]:
    """Parts that it has and that are of tokens alone."""
    names = ("token_types", "token_width", "mixture")
    return [name for name in names if getattr(config, name)]
