"""Settings of a sidecar: a wrong one is named."""

from pathlib import Path

import pytest

from pannier.sidecar.config import SidecarConfig
from pannier.wire import errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "nonsense"}, "--address"),
        ({"coordinator": "host:99999"}, "--coordinator"),
        ({"listen": "unix://relative"}, "--listen"),
        ({"memory": 1000}, "--memory 1000 is too little"),
        ({"spool_budget": 0}, "--spool-budget"),
        ({"grace_s": 0.0}, "--grace"),
        ({"idle_exit_s": -1.0}, "--idle-exit"),
        ({"host": ""}, "--host"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"coordinator": "host:1", "spool": Path("/spool"), **settings}
    with pytest.raises(errors.ConfigurationError, match=message):
        SidecarConfig(**fields)  # type: ignore[arg-type]
