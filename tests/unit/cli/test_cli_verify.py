"""``pannier verify`` finds every kind of damage, and nothing where there is none."""

from pathlib import Path
from typing import Any

import pytest

from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.processes.cli import Result, pannier
from support.storage.checkpoints import write, write_attempt, write_decision

ATTEMPT = "i1-inc-g0000000a-s3"
SIZE = 10_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A committed checkpoint of two ranks with two data files each."""
    directory = tmp_path / "run" / "step-3"
    write_attempt(directory, ATTEMPT, size=SIZE)
    return directory


def data_file(checkpoint: Path, rank: int, index: int) -> Path:
    return checkpoint / object_names.data_file(ATTEMPT, rank, index)


def damage(result: Result) -> dict[str, Any]:
    """Objects that are not as they should be."""
    answer = result.json()
    assert answer["ok"] is False
    return {file["name"]: file for file in answer["files"] if file["status"] != "ok"}


def test_a_whole_checkpoint_is_ok(checkpoint: Path) -> None:
    result = pannier("verify", str(checkpoint))
    assert result.code == 0, result
    assert result.out.startswith("ok: ")
    assert ATTEMPT in result.out
    answer = pannier("verify", str(checkpoint), "--json").json()
    assert answer["ok"] is True
    assert answer["attempt"] == ATTEMPT
    assert [file["status"] for file in answer["files"]] == ["ok"] * 5
    assert answer["files"][1] == {
        "name": object_names.data_file(ATTEMPT, 0, 0),
        "rank": 0,
        "status": "ok",
        "size": SIZE,
        "expected_size": SIZE,
        "crc32c": answer["files"][1]["expected_crc32c"],
        "expected_crc32c": answer["files"][1]["crc32c"],
    }


def test_a_file_url_is_a_path(checkpoint: Path) -> None:
    assert pannier("verify", f"file://{checkpoint}").code == 0


def test_a_flipped_bit_is_found(checkpoint: Path) -> None:
    path = data_file(checkpoint, 1, 0)
    data = bytearray(path.read_bytes())
    data[SIZE // 2] ^= 1
    path.write_bytes(data)
    result = pannier("verify", str(checkpoint), "--json")
    assert result.code == 1
    found = damage(result)
    assert list(found) == [path.name]
    assert found[path.name]["status"] == "checksum"
    assert found[path.name]["rank"] == 1
    table = pannier("verify", str(checkpoint))
    assert table.code == 1
    assert path.name in table.out
    assert f"should be {found[path.name]['expected_crc32c']}" in table.out


def test_a_truncated_file_is_found(checkpoint: Path) -> None:
    path = data_file(checkpoint, 0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert list(found) == [path.name]
    assert found[path.name]["status"] == "size"
    assert found[path.name]["expected_size"] == found[path.name]["size"] + 1


def test_a_missing_file_is_found(checkpoint: Path) -> None:
    path = data_file(checkpoint, 0, 0)
    path.unlink()
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert found[path.name]["status"] == "missing"
    assert found[path.name]["size"] is None


def test_swapped_files_are_found(checkpoint: Path) -> None:
    one, other = data_file(checkpoint, 0, 1), data_file(checkpoint, 1, 0)
    assert one.stat().st_size == other.stat().st_size
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert {name: file["status"] for name, file in found.items()} == {
        one.name: "checksum",
        other.name: "checksum",
    }


@pytest.mark.parametrize("change", [b"", b"metadata of somebody else"])
def test_damaged_metadata_is_found(checkpoint: Path, change: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(change)
    result = pannier("verify", str(checkpoint), "--json")
    assert result.code == 1
    assert list(damage(result)) == [".metadata"]


def test_a_missing_or_damaged_receipt_is_found(checkpoint: Path) -> None:
    (checkpoint / object_names.receipt(ATTEMPT, 0)).unlink()
    (checkpoint / object_names.receipt(ATTEMPT, 1)).write_bytes(b"\xff\xff")
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert {name: (file["rank"], file["status"]) for name, file in found.items()} == {
        object_names.receipt(ATTEMPT, 0): (0, "missing"),
        object_names.receipt(ATTEMPT, 1): (1, "malformed"),
    }


def test_a_receipt_of_another_attempt_is_no_receipt(checkpoint: Path) -> None:
    receipt = checkpoint / object_names.receipt(ATTEMPT, 1)
    other = records_pb2.Receipt.FromString(receipt.read_bytes())
    other.attempt = "i1-inc-g0000000a-s2"
    receipt.write_bytes(other.SerializeToString())
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert found[object_names.receipt(ATTEMPT, 1)]["status"] == "malformed"


def test_a_receipt_cannot_lead_out_of_the_checkpoint(checkpoint: Path) -> None:
    secret = checkpoint.parent / "secret"
    secret.write_bytes(b"x")
    path = checkpoint / object_names.receipt(ATTEMPT, 1)
    receipt = records_pb2.Receipt.FromString(path.read_bytes())
    receipt.files[0].name = "../secret"
    path.write_bytes(receipt.SerializeToString())
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert found["../secret"]["status"] == "malformed"
    assert found["../secret"]["size"] is None


def test_a_missing_manifest_is_found(checkpoint: Path) -> None:
    (checkpoint / object_names.manifest(ATTEMPT)).unlink()
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert found[object_names.manifest(ATTEMPT)]["status"] == "missing"


def test_another_plans_manifest_is_found(checkpoint: Path) -> None:
    path = checkpoint / object_names.manifest(ATTEMPT)
    manifest = records_pb2.PlanManifest.FromString(path.read_bytes())
    del manifest.members[1]
    path.write_bytes(manifest.SerializeToString())
    found = damage(pannier("verify", str(checkpoint), "--json"))
    assert found[object_names.manifest(ATTEMPT)]["status"] == "checksum"


def test_only_the_committed_attempt_is_verified(checkpoint: Path) -> None:
    older, newer = "i1-inc-g0000000a-s2", "i1-inc-g0000000a-s4"
    write_attempt(checkpoint, older, commit=False)
    write_decision(checkpoint, older, records_pb2.OUTCOME_ABORT)
    (checkpoint / object_names.data_file(older, 0, 0)).unlink()
    write_attempt(checkpoint, newer, commit=False)
    (checkpoint / object_names.data_file(newer, 0, 0)).write_bytes(b"half")
    result = pannier("verify", str(checkpoint), "--json")
    assert result.code == 0, result
    assert result.json()["attempt"] == ATTEMPT


def test_after_a_second_save_the_newer_attempt_counts(checkpoint: Path) -> None:
    newer = "i2-inc-g0000000a-s1"
    write_attempt(checkpoint, newer)
    data_file(checkpoint, 0, 0).unlink()  # superseded files may go
    result = pannier("verify", str(checkpoint), "--json")
    assert (result.code, result.json()["attempt"]) == (0, newer)


def test_what_is_not_committed_is_a_negative_answer(tmp_path: Path) -> None:
    write_attempt(tmp_path / "half", ATTEMPT, commit=False)
    for name in ("half", "nothing-here"):
        result = pannier("verify", str(tmp_path / name))
        assert result.code == 1, result
        assert "not a committed checkpoint" in result.err
        assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "shard-00001-model-00001-of-00001.safetensors"]
)
def test_a_checkpoint_in_safetensors_format_is_named_with_its_reader(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / "hub" / name, b"{}")
    result = pannier("verify", str(tmp_path / "hub"))
    assert result.code == 1
    assert "HuggingFaceStorageReader" in result.err
    # One below it is another directory's; and a save by Pannier is said to be none yet.
    write_attempt(tmp_path / "hub", ATTEMPT, commit=False)
    for directory in (tmp_path, tmp_path / "hub"):
        assert "not a committed checkpoint" in pannier("verify", str(directory)).err


def test_a_foreign_checkpoint_cannot_be_compared(tmp_path: Path) -> None:
    write(tmp_path / "foreign" / ".metadata", b"pickle")
    result = pannier("verify", str(tmp_path / "foreign"))
    assert result.code == 1
    assert "written by Pannier" in result.err


def test_a_damaged_decision_is_named(checkpoint: Path) -> None:
    (checkpoint / object_names.decision(ATTEMPT)).write_bytes(b"{")
    result = pannier("verify", str(checkpoint))
    assert result.code == 1
    assert object_names.decision(ATTEMPT) in result.err


def test_large_files_are_read_in_pieces(tmp_path: Path) -> None:
    directory = tmp_path / "large"
    write_attempt(directory, ATTEMPT, ranks=1, files=1, size=(20 << 20) + 17)
    assert pannier("verify", str(directory)).code == 0


@pytest.mark.parametrize("url", ["ftp://host/x", "gs://", "file:///a/../b"])
def test_a_url_that_is_none_is_wrong_usage(url: str) -> None:
    result = pannier("verify", url)
    assert result.code == 2, result
    assert "Traceback" not in result.err


def test_a_root_is_called_one_with_a_checkpoint_to_give_instead(checkpoint: Path) -> None:
    for command in (("verify",), ("rm", "--yes")):
        result = pannier(*command, str(checkpoint.parent))
        assert result.code == 1, result
        assert (
            f"it is a root, which `pannier ls` lists: give a checkpoint, like {checkpoint}"
            in result.err
        )
    assert pannier("verify", str(checkpoint)).code == 0
