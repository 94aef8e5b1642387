"""What `--normalize` does to the text that users send. Without it text stays as it is."""

from __future__ import annotations

import unicodedata

MODES = ("none", "nfc")


def normalize(text: str, mode: str) -> str:
    """`nfc`: composed characters (Unicode NFC), line breaks as LF, no white space around; `none`: as it is."""
    if mode == "none":
        return text
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()
