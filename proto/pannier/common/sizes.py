"""Human-readable sizes. Imports little, for a fast start of the command line."""

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS: Final = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_LARGEST: Final = 1 << 63
"""Offsets of files are signed."""


def parse_size(text: str) -> int:
    """Bytes of ``201326592``, ``192MiB``, ``1.5 GiB`` or ``2GB``. Raises ValueError saying what is wrong."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 192MiB, 2GiB or 1000000")
    number = float(match[1]) * _UNITS[(match[2] or "B").lower()]
    if not 1 <= number < _LARGEST:
        raise ValueError(f"{text!r} is not a positive number of bytes below 8 EiB")
    return int(number)


def size_text(count: float) -> str:
    """``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
