"""Normalization of what users write: off, or NFC with LF and no outer white space."""

from __future__ import annotations

import pytest

from headrace_router.text.normalize import normalize

TEXT = " e\u0301a\r\nb\rc \u212b\n"


@pytest.mark.parametrize(("mode", "made"), [("none", TEXT), ("nfc", "\u00e9a\nb\rc \u00c5")])
def test_modes(mode: str, made: str) -> None:
    assert normalize(TEXT, mode) == made
