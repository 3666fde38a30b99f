"""crc32c of a whole out of those of its parts, so that no byte is read twice for it."""

import functools
from typing import Final

import crc32c

_ZEROS: Final = bytes(1 << 20)

Tables = tuple[list[int], list[int], list[int], list[int]]


def append(crc: int, next_crc: int, length: int) -> int:
    """Checksum of bytes with ``crc`` followed by ``length`` bytes with ``next_crc``.

    Quick for lengths that occur again and again (chunks of a stream); the first
    use of a length costs as much as reading ``length`` bytes about thirty times.
    """
    if crc == 0:
        return next_crc
    first, second, third, fourth = _tables(length)
    return (
        first[crc & 0xFF]
        ^ second[crc >> 8 & 0xFF]
        ^ third[crc >> 16 & 0xFF]
        ^ fourth[crc >> 24]
        ^ next_crc
    )


@functools.lru_cache(maxsize=16)
def _tables(length: int) -> Tables:
    """What ``length`` bytes do to a checksum before them, by byte of that checksum.

    It is linear: what zeros do, less what they contribute themselves.
    """
    own = _after_zeros(0, length)
    bits = [_after_zeros(1 << bit, length) ^ own for bit in range(32)]
    tables: Tables = ([0], [0], [0], [0])
    for byte, table in enumerate(tables):
        for bit in range(8):
            table += [entry ^ bits[8 * byte + bit] for entry in table]
    return tables


def _after_zeros(crc: int, length: int) -> int:
    for start in range(0, length, len(_ZEROS)):
        crc = crc32c.crc32c(_ZEROS[: length - start], crc)
    return crc
