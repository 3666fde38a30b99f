"""A job's token in a file: its permissions, its replacement, and that no output has it."""

import os
import secrets
from pathlib import Path

import pytest

from pannier.client.config import load_settings
from pannier.wire import auth_token
from pannier.wire.auth_token import TokenFile
from pannier.wire.errors import ConfigurationError

TOKEN = "a1" * 16


def written(path: Path, text: str, mode: int = 0o400) -> Path:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o644, 0o444])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_that_no_other_user_can_write_is_read(tmp_path: Path, mode: int, end: str) -> None:
    file = TokenFile(written(tmp_path / "token", TOKEN + end, mode))
    assert auth_token.find_token(file.metadata()) == TOKEN
    assert file.digest() == auth_token.digest(TOKEN)
    assert len(file.digest()) == auth_token.DIGEST_BYTES


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_one_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "token", TOKEN, mode)
    with pytest.raises(ConfigurationError, match=rf"PANNIER_TOKEN_FILE={path} has mode 0{mode:o}"):
        TokenFile(path).metadata()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 characters"),
        ("short", "5 characters"),
        ("x" * 1025, "1025 characters|at most"),
        (f"{TOKEN}\n{TOKEN}", "one line"),
        (f"{TOKEN} {TOKEN}", "one line"),
        (TOKEN + "\u00e9", "one line"),
        (TOKEN + "\0", "one line"),
    ],
)
def test_what_is_no_token_is_refused_and_not_printed(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        TokenFile(written(tmp_path / "token", text)).metadata()
    for word in filter(None, text.split()):
        assert word not in str(refused.value)


def test_a_missing_file_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        TokenFile(tmp_path / "none").metadata()
    with pytest.raises(ConfigurationError, match=r"directory|not a file"):
        TokenFile(tmp_path).metadata()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="not a file"):
        TokenFile(tmp_path / "pipe").metadata()


def test_it_is_read_again_when_it_was_replaced_by_a_link(tmp_path: Path) -> None:
    """As the kubelet does it: the name links to ``..data/token``, and ``..data`` is another one."""
    for version, token in (("..1", "old" * 11), ("..2", "new" * 11)):
        (tmp_path / version).mkdir()
        written(tmp_path / version / "token", token, 0o440)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "token").symlink_to("..data/token")
    file = TokenFile(tmp_path / "token")
    assert auth_token.find_token(file.metadata()) == "old" * 11
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert auth_token.find_token(file.metadata()) == "new" * 11
    (tmp_path / "..data").unlink()
    with pytest.raises(ConfigurationError, match="No such file"):
        file.metadata()


def test_it_is_in_no_representation(tmp_path: Path) -> None:
    path = written(tmp_path / "token", TOKEN)
    file = TokenFile(path)
    file.metadata()
    settings = load_settings(sidecar=f"unix://{tmp_path}/s.sock", token_file=path)
    assert settings.token() is not None
    for text in (repr(file), str(file), repr(settings), repr(settings.token())):
        assert TOKEN not in text


def test_other_credentials_are_no_token() -> None:
    assert (
        auth_token.find_token([("authorization", "Basic " + TOKEN), ("x", "Bearer " + TOKEN)])
        is None
    )
    assert auth_token.find_token([("authorization", b"Bearer ")]) is None
    assert (
        auth_token.find_token([("user-agent", "grpc"), ("authorization", "Bearer " + TOKEN)])
        == TOKEN
    )


def test_the_client_shows_it_on_a_unix_socket_only(tmp_path: Path) -> None:
    path = written(tmp_path / "token", secrets.token_hex(16))
    with pytest.raises(ConfigurationError, match=r"PANNIER_TOKEN_FILE.*unix socket.*host:7070"):
        load_settings(sidecar="host:7070", token_file=path).token()
    # Embedded daemons know their user.
    assert load_settings(token_file=path).token() is None
    with pytest.raises(ConfigurationError, match="absolute"):
        load_settings(token_file="token")
