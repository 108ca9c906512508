"""Convert sizes in bytes from text such as '22GiB' and back."""

from __future__ import annotations

import re

from stageline.arguments import shown

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {prefix + "i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)b?", re.IGNORECASE)
LONGEST = 100  # characters; no sensible size is longer


def parse_bytes(text: str) -> float:
    """Return the number of bytes that a text gives; raise `ValueError` if it gives none.

    >>> parse_bytes("22GiB"), parse_bytes("1.5 MB"), parse_bytes("512")
    (23622320128.0, 1500000.0, 512.0)
    """
    match = SIZE.fullmatch(text.strip()) if len(text) <= LONGEST else None
    if not match or match[2].lower() not in UNITS:
        raise ValueError(f"{shown(text)} is not a size in bytes: write it like '22GiB' or '512MB'")
    return float(match[1]) * UNITS[match[2].lower()]


def format_bytes(size: float) -> str:
    """Return the size in the largest binary unit of which it has at least one.

    >>> format_bytes(23622320128)
    '22GiB'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = UNITS[unit[:2].lower()]
        if size >= scale:
            return f"{size / scale:.4g}{unit}"
    return f"{size:.4g}B"
