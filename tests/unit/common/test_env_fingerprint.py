"""Which variables decide where checkpoints go, and what is kept of them."""

import pytest

from pannier.common import env_fingerprint


@pytest.mark.parametrize(
    "name",
    [
        *("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_ENDPOINT_URL"),
        *(
            "AWS_ENDPOINT_URL_S3",
            "AWS_PROFILE",
            "AWS_DEFAULT_REGION",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        ),
        *("FSSPEC_S3_ENDPOINT_URL", "PANNIER_SPOOL", "PANNIER_STORAGE_OPTIONS", "PANNIER_ALLOW"),
        *("PANNIER_PLANNER", "PANNIER_COORDINATOR"),
    ],
)
def test_another_value_of_it_is_another_place(name: str) -> None:
    one = env_fingerprint.record({name: "one"})
    assert env_fingerprint.differing(one, env_fingerprint.record({name: "two"})) == [name]
    assert env_fingerprint.differing(one, env_fingerprint.record({})) == [name]
    assert env_fingerprint.differing(env_fingerprint.record({}), one) == [name]
    assert env_fingerprint.differing(one, env_fingerprint.record({name: "one"})) == []


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "FSSPEC_S3_SECRET"),
        *("GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_API_KEY", "PANNIER_JOB", "PANNIER_SAVE_TIMEOUT"),
        # Set by the client itself when it first looks into a bucket.
        *("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "HOME"),
    ],
)
def test_credentials_that_rotate_and_other_variables_are_not_compared(name: str) -> None:
    assert env_fingerprint.record({name: "one"}) == {}


def test_an_empty_variable_is_none() -> None:
    assert env_fingerprint.record({"AWS_PROFILE": ""}) == {}


def test_what_a_flag_said_holds_for_every_trainer() -> None:
    theirs: env_fingerprint.Record = {"PANNIER_ALLOW": None}
    assert env_fingerprint.differing(theirs, {}) == []
    assert env_fingerprint.differing(theirs, env_fingerprint.record({"PANNIER_ALLOW": "/x"})) == []


def test_its_text_has_names_and_no_values() -> None:
    record = env_fingerprint.record({"STORAGE_EMULATOR_HOST": "http://user:secret@host"})
    text = env_fingerprint.encode(record)
    assert "STORAGE_EMULATOR_HOST" in text
    assert "secret" not in text
    assert env_fingerprint.decode(text) == record
