"""How messages become a prompt: what a Hugging Face folder says of it."""

import dataclasses
from pathlib import Path
from typing import Any

from colossax.documents import read_json
from colossax.errors import InputError

TEMPLATE_FILE, ABOUT_FILE = "chat_template.jinja", "tokenizer_config.json"
_GENERATION_FILE = "generation_config.json"
_REMEDY = "copy the file again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A model's way of being talked to.

    Attributes:
        template: Jinja source that makes a prompt of messages; None: there is none.
        bos: Characters of the token that begins a document, for the template; may be empty.
        ends: Token ids beside the tokenizer's own that end an answer.
    """

    template: str | None = None
    bos: str = ""
    ends: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return self != Chat()

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"template": self.template, "bos": self.bos, "ends": list(self.ends)}

    @classmethod
    def from_json(cls, document: dict[str, Any] | None) -> "Chat":
        """What `to_json` made; None: nothing is known."""
        found = document or {}
        return cls(
            template=found.get("template"),
            bos=found.get("bos", ""),
            ends=tuple(found.get("ends", ())),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Chat":
        """Of `chat_template.jinja`, or the `chat_template` of `tokenizer_config.json`.

        Of several templates it is the one called `default`. Ends are those of
        `generation_config.json`.

        Raises:
            InputError: A file cannot be read, or holds no template where it says there is one.
        """
        about, generation = (_read(folder / name) for name in (ABOUT_FILE, _GENERATION_FILE))
        found = generation.get("eos_token_id")
        ends = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(token) is int and token >= 0 for token in ends):
            raise InputError(
                f"{folder / _GENERATION_FILE}: eos_token_id is {ends!r}, which are no token ids;"
                f" {_REMEDY}"
            )
        bos = about.get("bos_token") or ""
        bos = bos.get("content", "") if isinstance(bos, dict) else bos
        return cls(template=_template(folder, about), bos=bos, ends=tuple(ends))


def _template(folder: Path, about: dict[str, Any]) -> str | None:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"{file}: cannot be read ({problem}); {_REMEDY}") from problem
    found = about.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise InputError(
            f"{folder / ABOUT_FILE}: chat_template is no text; {_REMEDY}, or leave it out"
        )
    return found


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    if not file.is_file():
        return {}
    found = read_json(file, remedy=_REMEDY)
    return found if isinstance(found, dict) else {}
