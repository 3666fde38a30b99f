"""Names of checkpoints and of extra files as users give them."""

import pytest

from pannier.v1 import records_pb2
from pannier.wire import limits
from pannier.wire.errors import InvalidRequestError
from pannier.wire.object_names import (
    check_extra_name,
    data_file,
    extra_file,
    find_clash,
    split_checkpoint_id,
)

ATTEMPT = "i1-a-g00000000-s1"


@pytest.mark.parametrize(
    ("checkpoint_id", "root", "name"),
    [
        ("/checkpoints/step-100", "/checkpoints", "step-100"),
        ("gs://bucket/run/step-100", "gs://bucket/run", "step-100"),
        ("s3://bucket/step-100", "s3://bucket", "step-100"),
        ("/checkpoints/.pannier-2", "/checkpoints", ".pannier-2"),
    ],
)
def test_a_checkpoint_lies_below_a_root(checkpoint_id: str, root: str, name: str) -> None:
    assert split_checkpoint_id(checkpoint_id) == (root, name)


@pytest.mark.parametrize(
    "checkpoint_id", ["/checkpoints/.pannier", "/checkpoints/.pannier/", "gs://bucket/run/.pannier"]
)
def test_the_place_of_our_own_records_is_no_checkpoint(checkpoint_id: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"another name than \.pannier"):
        split_checkpoint_id(checkpoint_id)


@pytest.mark.parametrize(
    "name", ["meta.pt", "rng/rank_0.pt", "Zustand ü.json", "__init__.py", "a" * 255]
)
def test_an_extra_file_has_a_name_below_its_checkpoint(name: str) -> None:
    check_extra_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/meta.pt",
        "../meta.pt",
        "a/../meta.pt",
        "a//b",
        "./a",
        "a/",
        ".metadata",
        "dcp/.metadata",
        "__0.metadata",
        "x.distcp",
        data_file(ATTEMPT, 0, 0).removesuffix(".distcp"),
        ".pannier/x",
        "a/.pannier",
        ".pannier-lock",
        "a\nb",
        "a\0b",
        "ü" * 128,
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="can't be the name of an extra file"):
        check_extra_name(name)


def test_a_file_is_no_directory_of_another() -> None:
    assert find_clash(["a", "a-b", "a/b"]) == ("a", "a/b")
    assert find_clash(["a", "b", "a"]) == ("a", "a")
    assert find_clash(["a-b", "a/b", "ab", "a/c"]) is None


def receipt(*places: tuple[str, int, int], size: int) -> records_pb2.Receipt:
    own = extra_file(ATTEMPT, 3)
    extra = [
        records_pb2.ExtraFile(name=f"e{index}", file=file, offset=offset, size=length)
        for index, (file, offset, length) in enumerate(places)
    ]
    files = [records_pb2.DataFile(name=own, size=size)] if size else []
    return records_pb2.Receipt(attempt=ATTEMPT, rank=3, files=files, extra_files=extra)


def test_the_extra_files_of_a_rank_are_all_of_one_data_file() -> None:
    own = extra_file(ATTEMPT, 3)
    limits.check_extra_files(receipt(size=0))
    limits.check_extra_files(receipt(("", 0, 0), size=0))
    limits.check_extra_files(receipt((own, 0, 4), ("", 0, 0), (own, 4, 1), size=5))
    for wrong in (
        receipt(size=5),
        receipt((own, 0, 4), size=0),
        receipt((own, 0, 4), size=5),
        receipt((own, 0, 4), (own, 3, 2), size=5),
        receipt((own, 1, 4), size=5),
        receipt((data_file(ATTEMPT, 3, 0), 0, 5), size=5),
        receipt((extra_file(ATTEMPT, 2), 0, 5), size=5),
        receipt((own, 0, limits.MAX_EXTRA_BYTES + 1), size=limits.MAX_EXTRA_BYTES + 1),
    ):
        with pytest.raises(InvalidRequestError):
            limits.check_extra_files(wrong)
