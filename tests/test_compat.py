"""Versions: what is refused and how they are compared."""

import jax
import pytest

from colossax import compat


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.12.0.1rc1", (0, 12, 0, 1)), ("1.0.dev3", (1, 0, 0))],
)
def test_a_version_is_its_numbers(text, numbers):
    assert compat.version_tuple(text) == numbers


@pytest.mark.catches("oldest-jax")
def test_a_jax_that_is_too_old_is_refused(monkeypatch):
    compat.require_supported_jax()
    monkeypatch.setattr(jax, "__version__", "0.9.12")
    with pytest.raises(ImportError, match=r"needs jax >= 0\.10\.2, found 0\.9\.12; upgrade jax"):
        compat.require_supported_jax()
