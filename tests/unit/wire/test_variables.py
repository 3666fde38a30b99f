"""Misspelt environment variables."""

import importlib

import pytest

from pannier.cli.main import _SUMMARIES
from pannier.client.config import Settings
from pannier.wire import variables


def test_all_variables_of_the_client_and_of_all_commands_are_known() -> None:
    found = {f"PANNIER_{name.upper()}" for name in Settings.model_fields}
    for name in _SUMMARIES:
        for parameter in importlib.import_module(f"pannier.cli.commands.{name}").command.params:
            given = parameter.envvar or ()
            found |= {given} if isinstance(given, str) else set(given)
    # PANNIER_LOG: the client's console; PANNIER_TIME_SCALE: all durations.
    assert found | {"PANNIER_LOG", "PANNIER_TIME_SCALE"} == variables.KNOWN


def test_a_misspelt_variable_is_named_once_with_the_nearest_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variables, "_warned", set())
    given = ["PANNIER_KEEP_NEWST", "PANNIER_SPOOL", "PANNIERSPOOL", "HOME"]
    first, second = variables.misspelt(given)
    assert "PANNIERSPOOL" in first
    assert "PANNIER_SPOOL?" in first
    assert "PANNIER_KEEP_NEWST is no variable" in second
    assert "PANNIER_KEEP_NEWEST?" in second
    assert variables.misspelt(given) == []


def test_what_kubernetes_sets_for_a_service_is_no_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variables, "_warned", set())
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR")
    assert variables.misspelt([f"PANNIER_COORDINATOR_{name}" for name in names]) == []
