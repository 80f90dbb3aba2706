"""Who may ask: keys from a file."""

import hashlib
import hmac
from pathlib import Path

from colossax.config import user_path
from colossax.documents import read_small, why
from colossax.errors import InputError
from colossax.serve.http.errors import no_key

_LONGEST = 4096


class Keys:
    """Keys that are accepted.

    Args:
        keys: None accepts any, and none.
    """

    def __init__(self, keys: tuple[str, ...] | None) -> None:
        self._keys = None if keys is None else tuple(key.encode() for key in keys)

    @classmethod
    def of_file(cls, path: str | None) -> "Keys":
        """The keys of a file, one a line; empty lines and those that begin with # count for none.

        Raises:
            InputError: It cannot be read, or holds no key.
        """
        if path is None:
            return cls(None)
        file = user_path(path, "--api-key-file", utf8=False)
        lines = _read(file).splitlines()
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        if not keys:
            raise InputError(f"--api-key-file: {file} holds no key; write one a line")
        return cls(keys)

    def check(self, authorization: str | None) -> str | None:
        """What tells the caller apart from others; None where anyone may ask.

        All keys are compared, each in a time that does not depend on where it differs.

        Args:
            authorization: The header of this name.

        Raises:
            Refusal: 401.
        """
        if self._keys is None:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise no_key("a key is needed; send it as the header 'Authorization: Bearer KEY'")
        asked = given.strip().encode("latin-1", "replace")[:_LONGEST]  # the bytes that were sent
        same = [hmac.compare_digest(asked, key) for key in self._keys]
        if not any(same):
            raise no_key("the key is not one of this server's; ask who runs it for one")
        return hashlib.blake2b(asked, digest_size=8).hexdigest()


def _read(file: Path) -> str:
    try:
        return read_small(file, 1 << 20).decode()
    except UnicodeDecodeError:
        raise InputError(f"--api-key-file: {file} is not UTF-8; write one key a line") from None
    except (OSError, ValueError) as problem:
        raise InputError(
            f"--api-key-file: {file} cannot be read ({why(problem)}); name a file of keys"
        ) from problem
