"""What tests of conversations share."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Encoded conversations are kept for a session, and for no other."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
