"""What ``pannier up`` records of itself: the variables that decide where checkpoints go, and whose it is."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pannier.common import daemon_record
from pannier.common.daemon_record import DaemonRecord, decisive_variables, differing
from pannier.wire.version import WIRE_VERSION, package_version


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
        *("PANNIER_PLANNER", "PANNIER_COORDINATOR", "PANNIER_KEEP", "PANNIER_KEEP_NEWEST"),
        *("PANNIER_RETENTION_PATTERN", "PANNIER_GRACE_SUPERSEDED"),
    ],
)
def test_another_value_of_it_is_another_place(name: str) -> None:
    one = decisive_variables({name: "one"})
    assert differing(one, decisive_variables({name: "two"})) == [name]
    assert differing(one, decisive_variables({})) == [name]
    assert differing(decisive_variables({}), one) == [name]
    assert differing(one, decisive_variables({name: "one"})) == []


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
    assert decisive_variables({name: "one"}) == {}


def test_an_empty_variable_is_none() -> None:
    assert decisive_variables({"AWS_PROFILE": ""}) == {}


def test_what_a_flag_said_holds_for_every_trainer() -> None:
    theirs: daemon_record.Variables = {"PANNIER_ALLOW": None}
    assert differing(theirs, {}) == []
    assert differing(theirs, decisive_variables({"PANNIER_ALLOW": "/x"})) == []


def test_its_file_has_names_and_no_values(tmp_path: Path) -> None:
    variables = decisive_variables({"STORAGE_EMULATOR_HOST": "http://user:secret@host"})
    record = DaemonRecord.of_this_process(variables, exits_idle=True)
    record.write(tmp_path)
    (file,) = tmp_path.iterdir()
    assert "STORAGE_EMULATOR_HOST" in file.read_text()
    assert "secret" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert daemon_record.read(tmp_path) == record


def test_a_later_versions_record_is_read(tmp_path: Path) -> None:
    record = DaemonRecord.of_this_process({}, exits_idle=False)
    record.write(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "later": 1}))
    assert daemon_record.read(tmp_path) == record


def test_there_may_be_no_record(tmp_path: Path) -> None:
    assert daemon_record.read(tmp_path) is None


def test_it_says_whose_the_daemons_are() -> None:
    record = DaemonRecord.of_this_process({}, exits_idle=True)
    user = daemon_record.user_name(os.getuid())
    assert record.description == (
        f"pannier {package_version()} of the environment {sys.prefix}, process {os.getpid()} of "
        f"user {user}"
    )
    assert record.mismatch() == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wire_version": 77}, f"have wire version 77, this process has {WIRE_VERSION}"),
        ({"version": "9.9"}, f"another version, this process is pannier {package_version()}"),
        ({"prefix": "/no/such"}, "an environment that no longer exists"),
    ],
)
def test_daemons_of_another_origin_are_named_so(change: dict[str, object], reason: str) -> None:
    record = replace(DaemonRecord.of_this_process({}, exits_idle=True), **change)  # type: ignore[arg-type]
    assert reason in record.mismatch()
    assert record.speaks_ours == ("wire_version" not in change)


def test_a_user_without_a_name_has_a_number() -> None:
    assert daemon_record.user_name(2**31 - 7) == str(2**31 - 7)
