"""What a rank saves in the chaos test: a function of incarnation, number, world size and rank.

So a reader knows from a checkpoint alone whose save it is, and knows every bit of it.
"""

from typing import Any

import crc32c
import torch

from support.states import bits

STAMP = "stamp"
_SMALL, _LARGE = 24 << 10, 2 << 20
"""Elements of a rank's own tensor: an upload in one request, and one of several chunks."""
_SHARED_ROWS = 7


def _noise(*words: int | str) -> torch.Generator:
    seed = crc32c.crc32c(repr(words).encode())
    return torch.Generator().manual_seed(seed)


def _own(incarnation: int, number: int, rank: int) -> dict[str, Any]:
    noise = _noise(incarnation, number, "rank", rank)
    elements = _LARGE if number % 4 == 0 else _SMALL
    return {
        f"rank{rank}.weight": torch.randn(elements, generator=noise),
        f"rank{rank}.count": torch.randint(0, 1 << 40, (5, 3), generator=noise),
        f"rank{rank}.note": {"incarnation": incarnation, "number": number, "text": "x" * number},
    }


def _sharded(incarnation: int, number: int) -> torch.Tensor:
    return torch.randn(_SHARED_ROWS, 33, generator=_noise(incarnation, number, "sharded"))


def _common(incarnation: int, number: int, world: int) -> dict[str, Any]:
    return {
        STAMP: torch.tensor([incarnation, number, world]),
        "replicated": torch.randn(64, 9, generator=_noise(incarnation, number, "replicated")),
    }


def of_rank(incarnation: int, number: int, world: int, rank: int, mesh: Any) -> dict[str, Any]:
    """The state dict that the rank hands over."""
    from torch.distributed.tensor import DTensor, Shard

    full = _sharded(incarnation, number)
    parts = full.chunk(world)
    local = parts[rank].clone() if rank < len(parts) else full[:0].clone()
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return {
        **_common(incarnation, number, world),
        **_own(incarnation, number, rank),
        "sharded": sharded,
    }


def whole(incarnation: int, number: int, world: int) -> dict[str, Any]:
    """The state dict of all ranks together, as a single reader loads it."""
    state = {**_common(incarnation, number, world), "sharded": _sharded(incarnation, number)}
    for rank in range(world):
        state.update(_own(incarnation, number, rank))
    return state


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same shapes with other content, to load into."""
    return {
        key: torch.full_like(value, 77)
        if isinstance(value, torch.Tensor)
        else dict.fromkeys(value, "nothing")
        for key, value in state.items()
    }


def scribble(state: dict[str, Any]) -> None:
    """What training does to a state dict once it is staged."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            for part in bits.parts(value):
                part.fill_(13)
        else:
            value["number"] = -1


def checksums(state: dict[str, Any]) -> dict[str, int]:
    """crc32c of the local bits of each tensor."""
    return {
        key: crc32c.crc32c(b"".join(bits.bits(part) for part in bits.parts(value)))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def checksums_of(loaded: dict[str, Any], world: int, rank: int) -> dict[str, int]:
    """What :func:`checksums` must have said on a rank, from what a single reader loaded."""
    parts = loaded["sharded"].chunk(world)
    own = {
        key: value
        for key, value in loaded.items()
        if key == STAMP or key == "replicated" or key.startswith(f"rank{rank}.")
    }
    own["sharded"] = parts[rank] if rank < len(parts) else loaded["sharded"][:0]
    return checksums(own)
