"""Versions: what is refused and how they are compared."""

import subprocess
import sys

import jax
import pytest

from colossax import versions


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.12.0.1rc1", (0, 12, 0, 1)), ("1.0.dev3", (1, 0, 0))],
)
def test_a_version_is_its_numbers(text, numbers):
    assert versions.version_tuple(text) == numbers


@pytest.mark.catches("oldest-jax")
def test_a_jax_that_is_too_old_is_refused(monkeypatch):
    versions.require_supported_jax()
    monkeypatch.setattr(jax, "__version__", "0.9.12")
    with pytest.raises(ImportError, match=r"needs jax >= 0\.10\.2, found 0\.9\.12; upgrade jax"):
        versions.require_supported_jax()


def test_it_is_refused_before_it_is_imported(tmp_path):
    info = tmp_path / "jax-0.9.12.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.9.12\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import colossax
except ImportError as problem:
    print(problem, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "colossax needs jax >= 0.10.2, found 0.9.12; upgrade jax False\n"
