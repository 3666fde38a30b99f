"""Metrics of both daemons: steps of checkpoint ids, and the age of the last commit."""

import pytest
from prometheus_client import CollectorRegistry

from pannier.common.message_json import timestamp
from pannier.daemon.metrics import SaveCounts, step_of
from pannier.v1 import save_pb2


@pytest.mark.parametrize(
    ("checkpoint", "step"),
    [
        ("gs://bucket/run/step-1000", 1000),
        ("/c/step-7/", 7),
        ("/c/0042", 42),
        ("s3://bucket/final", None),
        ("/c/7/final", None),
        ("/c/" + "1" * 40, None),
        ("/c/step-٣", None),
    ],
)
def test_the_step_is_the_number_at_the_end(checkpoint: str, step: int | None) -> None:
    assert step_of(checkpoint) == step


def test_a_jobs_age_counts_from_its_first_save_until_it_has_a_commit() -> None:
    counts = SaveCounts(CollectorRegistry())
    save = save_pb2.SaveId(job="llama", incarnation="i", group="g", number=1)
    counts.began("llama", 1000.0)
    ages = {family.name: family for family in counts.collect()}
    (age,) = ages["pannier_last_commit_age_seconds"].samples
    assert age.value > 1e9
    assert ages["pannier_last_committed_step"].samples == []
    for number, at in ((2, 5000.0), (1, 4000.0)):
        counts.ended(
            save_pb2.SaveStatus(
                save=save,
                checkpoint_id=f"/c/step-{number}",
                state=save_pb2.SAVE_STATE_COMMITTED,
                created_at=timestamp(at),
                committed_s=2,
                bytes_total=10,
            )
        )
    families = {family.name: family.samples for family in counts.collect()}
    assert families["pannier_last_commit_timestamp_seconds"][0].value == 5002
    assert families["pannier_committed_bytes"][0].value == 20
    assert families["pannier_last_committed_step"][0].value == 2
