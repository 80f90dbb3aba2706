"""What stands beside a model's weights and says which vector a text has: `modules.json` and more.

`modules.json` lists modules in the order in which they run, each in a folder of its own: the model,
a pooling, and perhaps what brings vectors to length 1.
"""

import json
from pathlib import Path
from typing import Any

from colossax.documents import read_json
from colossax.errors import InputError
from colossax.nn import HeadConfig

MODULES, ABOUT = "modules.json", "config_sentence_transformers.json"
_TEXT = "sentence_bert_config.json"
_POOLING = Path("1_Pooling", "config.json")
_REMEDY = "copy the file again"
_KNOWN = ("Transformer", "Pooling", "Normalize")

_MODES = {"cls": "first", "mean": "mean", "lasttoken": "last"}
"""Their names of poolings and ours."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FLAG = "pooling_mode_"


def head_of_folder(folder: Path) -> HeadConfig | None:
    """The head that a folder's `modules.json` describes; None where there is no such file.

    Raises:
        InputError: A file cannot be read, or asks for what is not supported: the sentence says
            what.
    """
    file = folder / MODULES
    if not file.is_file():
        return None
    listed = read_json(file, list, remedy=_REMEDY)
    named = [one if isinstance(one, dict) else {} for one in listed]
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in named]
    if kinds not in (list(_KNOWN[:2]), list(_KNOWN)):
        raise InputError(
            f"{file}: modules {', '.join(kinds) or '(none)'} are not supported; only"
            f" {', then '.join(_KNOWN)} are, the last of which may be left out"
        )
    _check_texts(folder)
    place = str(named[1].get("path") or _POOLING.parent)
    if Path(place).name != place:
        raise InputError(f"{file}: path {place!r} is no folder beside it; {_REMEDY}")
    pool = _pool(folder / place / "config.json")
    return HeadConfig(pool=pool, normalise=len(kinds) == len(_KNOWN))


def _check_texts(folder: Path) -> None:
    """Refuse texts that are changed before they are read."""
    if _read(folder / _TEXT).get("do_lower_case"):
        raise InputError(
            f"{folder / _TEXT}: do_lower_case is not supported; give a tokenizer.json that makes"
            " letters small, and false"
        )
    if (name := _read(folder / ABOUT).get("default_prompt_name")) is not None:
        raise InputError(
            f"{folder / ABOUT}: default_prompt_name {name!r} is not supported; put the prompt"
            " before the texts that you ask with, and give null"
        )


def _pool(file: Path) -> str:
    found = read_json(file, remedy=_REMEDY)
    mode = found.get("pooling_mode")
    if mode is None:
        flags = [name for name, on in found.items() if name.startswith(_FLAG) and on is True]
        mode = _FLAGS.get(flags[0], flags[0]) if len(flags) == 1 else flags
    pool = _MODES.get(mode) if isinstance(mode, str) else None
    if pool is None:
        raise InputError(
            f"{file}: pooling {mode!r} is not supported; only one of {', '.join(_MODES)} is"
        )
    if found.get("include_prompt", True) is False:
        raise InputError(
            f"{file}: include_prompt false is not supported, as nobody says where a prompt ends;"
            " give true"
        )
    return pool


def write_modules(folder: Path, head: HeadConfig, width: int) -> None:
    """Write what `head_of_folder` reads.

    Args:
        folder: Of the export.
        head: That tells embeddings.
        width: Numbers of a hidden state.

    Raises:
        InputError: The files have no place for its pooling.
    """
    modes = {ours: theirs for theirs, ours in _MODES.items()}
    if head.pool not in modes:
        raise InputError(
            f"model.head.pool: '{head.pool}' cannot be exported; the format has only"
            f" {', '.join(modes)}"
        )
    kinds = _KNOWN if head.normalise else _KNOWN[:2]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    flags = {flag: mode == modes[head.pool] for flag, mode in _FLAGS.items()}
    _write(folder / MODULES, modules)
    _write(folder / _POOLING, {"word_embedding_dimension": width, **flags})


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    return read_json(file, remedy=_REMEDY) if file.is_file() else {}
