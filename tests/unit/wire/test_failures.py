import pytest

from pannier.v1 import save_pb2
from pannier.wire import errors
from pannier.wire.failures import (
    aborted_error,
    failure_kind,
    failures_text,
    rank_text,
    ranks_text,
    shorten,
)


def test_long_lists_of_ranks_are_cut() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([3, 7]) == "ranks [3, 7]"
    assert ranks_text(range(28)).endswith("14, 15] and 12 more")
    assert rank_text(3, "node-2") == "rank 3 (host node-2)"


def test_causes_are_named_by_rank_and_each_once() -> None:
    failures = [save_pb2.Failure(rank=rank, host="h", message=f"m{rank}") for rank in (2, 1)]
    assert failures_text(failures) == "rank 1 (host h): m1; rank 2 (host h): m2"
    shared = [save_pb2.Failure(rank=rank, message="ranks 1 and 2 differ") for rank in (1, 2)]
    assert failures_text(shared) == "ranks 1 and 2 differ"
    assert failures_text([save_pb2.Failure(rank=-1, message="no space")]) == "no space"
    assert shorten(["a", "b", "c"], 2) == "a, b and 1 more"


@pytest.mark.parametrize(
    ("kind", "error", "verb"),
    [
        (save_pb2.FAILURE_KIND_SKIPPED, errors.SaveSkippedError, "skipped"),
        (save_pb2.FAILURE_KIND_EXISTS, errors.CheckpointExistsError, "aborted"),
        (save_pb2.FAILURE_KIND_STORAGE, errors.SaveAbortedError, "aborted"),
    ],
)
def test_the_error_of_an_aborted_save_follows_from_its_failures(
    kind: "save_pb2.FailureKind", error: type[errors.SaveAbortedError], verb: str
) -> None:
    made = aborted_error("j/i/g/1", "/x", [save_pb2.Failure(rank=3, kind=kind, message="why")])
    assert type(made) is error
    assert str(made) == f"save j/i/g/1 to /x was {verb}: rank 3: why"
    assert made.failures[3].kind == errors.kind_name(kind)


def test_errors_have_a_kind_and_others_that_of_the_caller() -> None:
    assert failure_kind(errors.IntegrityError("x")) == save_pb2.FAILURE_KIND_INTEGRITY
    assert failure_kind(errors.InvalidRequestError("x")) == save_pb2.FAILURE_KIND_CLIENT
    refused = failure_kind(
        errors.InvalidRequestError("x"), refused=save_pb2.FAILURE_KIND_INVALID_PLAN
    )
    assert refused == save_pb2.FAILURE_KIND_INVALID_PLAN
    assert failure_kind(ValueError("x")) == save_pb2.FAILURE_KIND_INTERNAL
