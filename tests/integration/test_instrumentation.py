"""Processes that OpenTelemetry's auto-instrumentation has wrapped, as ``opentelemetry-instrument`` starts them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.instrumentation import auto_instrumentation

from support.network.otel_collector import Collector
from support.network.status_pages import until
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks

INSTRUMENTED = {
    # What opentelemetry-instrument puts there, so that child processes are instrumented, too.
    "PYTHONPATH": str(Path(auto_instrumentation.__file__).parent),
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}

TRAINER = """
import os
import torch
import torch.distributed as dist
from pannier import client

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in (1, 2):
    state = {f"weight-{rank}": torch.arange(100_000.0) + step}
    client.save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}")
latest = client.latest(os.environ["ROOT"])
assert latest.endswith("step-2"), latest
loaded = {f"weight-{rank}": torch.zeros(100_000)}
client.load(loaded, checkpoint_id=latest)
assert torch.equal(loaded[f"weight-{rank}"], torch.arange(100_000.0) + 2)
client.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def daemons(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    environment = {**INSTRUMENTED, **collector.environment()}
    with Daemons(
        tmp_path_factory.mktemp("instrumented"), environment=environment, start=False
    ) as prepared:
        for daemon in (prepared.coordinator, prepared.sidecar):
            daemon.forked = False
            daemon.start()
        yield prepared


@pytest.mark.parametrize("transport", ["mapped", "streamed"])
@pytest.mark.parametrize("trainers", ["plain trainers", "instrumented trainers"])
def test_saves_and_loads_work_where_grpc_is_instrumented(
    collector: Collector, daemons: Daemons, tmp_path: Path, transport: str, trainers: str
) -> None:
    environment = {
        **daemons.env(ROOT=str(tmp_path), PANNIER_TRANSPORT=transport),
        **(INSTRUMENTED if trainers == "instrumented trainers" else {}),
        **collector.environment(),
    }
    with start_ranks(TRAINER, 2, environment, torchrun=trainers != "plain trainers") as ranks:
        finished = ranks.wait(120).check()
    logs = [*finished.outputs, daemons.sidecar.log(), daemons.coordinator.log()]
    assert not any("Traceback" in log or "never retrieved" in log for log in logs), logs
    # The instrumentation was there: its spans are not Pannier's own.
    method = "/pannier.v1.Coordinator/Plan"
    until(collector.spans, lambda spans: any(each.name == method for each in spans))
