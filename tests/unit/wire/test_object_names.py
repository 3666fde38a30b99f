"""Names of checkpoints as users give them."""

import pytest

from pannier.wire.errors import InvalidRequestError
from pannier.wire.object_names import split_checkpoint_id


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
