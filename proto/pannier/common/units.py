"""Sizes and durations as people write and read them. Imports little, for a fast start of the command line."""

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS: Final = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_LARGEST: Final = 1 << 63
"""Offsets of files are signed."""
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_LONG: Final = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


def counted(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30min``, ``1.5 h`` or ``2d 12h``. Raises ValueError saying what is wrong."""
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise ValueError(
            f"{text!r} is not a duration with its unit (s, min, h, d), like 90s or 2d12h"
        )
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a positive duration")
    return seconds


def duration_text(seconds: float) -> str:
    """``59 ms``, ``0.94 s``, ``4 min 10 s``, ``1 h 30 min``: never more than two units."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 0.995:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for name, unit, lower_name, lower in _LONG:
        # Rounded first, so that no second unit reaches the first one.
        count, rest = divmod(round(seconds / lower) * lower, unit)
        if count:
            return f"{count} {name} {rest // lower} {lower_name}" if rest else f"{count} {name}"
    return f"{seconds:.0f} s"
