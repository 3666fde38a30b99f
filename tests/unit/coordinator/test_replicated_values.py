"""Which replicated keys have different values, by the hashes that ranks send."""

from pannier.coordinator.planning.replicas import ReplicaHashes


def test_equal_values_and_keys_of_one_rank_are_no_warning() -> None:
    hashes = ReplicaHashes()
    hashes.add(0, {"step": 1, "rng.0": 5})
    hashes.add(1, {"step": 1, "rng.1": 6})
    hashes.add(1, {"step": 1, "rng.1": 6})
    assert hashes.warning() == ""


def test_each_key_is_named_with_its_ranks() -> None:
    hashes = ReplicaHashes()
    for rank in reversed(range(8)):
        hashes.add(rank, {"step": 1, "rng": rank // 4, "lr": min(rank, 1)})
    assert hashes.warning().startswith(
        "2 replicated keys have different values on different ranks, of which the checkpoint keeps one: "
        "'lr' (2 values: ranks 0 and 1 differ), 'rng' (2 values: ranks 0 and 4 differ)."
    )


def test_many_keys_are_counted() -> None:
    hashes = ReplicaHashes()
    for rank in range(2):
        hashes.add(rank, {f"k{n}": rank for n in range(9)})
    assert hashes.warning().startswith("9 replicated keys have")
    assert "'k4' (2 values: ranks 0 and 1 differ) and 4 more." in hashes.warning()
