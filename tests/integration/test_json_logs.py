"""A save in both daemons' logs as JSON: each line that is about it says so."""

import json
from pathlib import Path
from typing import Any

from support.actors.hand import Party
from support.processes.daemons import Daemons
from support.processes.watching import COMMITTED, await_save


def test_a_save_can_be_followed_by_its_fields(tmp_path: Path) -> None:
    checkpoint = f"{tmp_path}/step-5"
    arguments = ["--log-format", "json"]
    with Daemons(
        tmp_path, sidecar_arguments=arguments, environment={"PANNIER_LOG_FORMAT": "json"}
    ) as daemons:
        with Party([daemons.sidecar.address] * 2) as party:
            party.save(checkpoint, 1)
            save = await_save(
                daemons.sidecar.address, checkpoint, lambda each: each.state == COMMITTED
            )
        daemons.sidecar.stop()
        daemons.coordinator.stop()
        logs = {name: daemon.log() for name, daemon in _named(daemons).items()}
    logged = {name: [json.loads(line) for line in log.splitlines()] for name, log in logs.items()}
    for name, lines in logged.items():
        assert {line["daemon"] for line in lines} == {name}
        assert all(line.keys() >= {"timestamp", "level", "logger", "host"} for line in lines)
        about = [line for line in lines if save.id in line["message"]]
        assert about
        for line in about:
            assert (line["job"], line["save"], line["checkpoint"]) == ("job", save.id, checkpoint)
    durable = [line for line in logged["sidecar"] if line["message"].endswith("is durable")]
    assert _of(durable, "rank") == {0, 1}
    assert _of(durable, "attempt") == {save.attempt}
    committed = [line for line in logged["coordinator"] if "COMMITTED" in line["message"]]
    assert _of(committed, "attempt") == {save.attempt}


def _named(daemons: Daemons) -> dict[str, Any]:
    return {"sidecar": daemons.sidecar, "coordinator": daemons.coordinator}


def _of(lines: list[dict[str, Any]], field: str) -> set[Any]:
    return {line[field] for line in lines}
