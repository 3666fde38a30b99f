"""Traces of saves over trainer, sidecar and coordinator; and that they cost nothing when they are off."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.common import tracing
from pannier.v1 import save_pb2
from support.actors.hand import Party
from support.network.otel_collector import Collector, Span
from support.network.status_pages import until
from support.processes.daemons import Daemons, clean_environment
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import ABORTED, await_save

TRAINER = """
import os
from pannier.common import timeouts
timeouts.TRACES_EXPORT_S = 60.0  # the collector may stand still
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pannier import client

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {f"weight-{rank}": torch.arange(100_000.0)}
if "WRITER" in os.environ:
    dcp.save(state, storage_writer=client.StorageWriter(os.environ["CHECKPOINT"]))
else:
    client.save(state, checkpoint_id=os.environ["CHECKPOINT"])
dist.destroy_process_group()
"""
MS = 1_000_000


@pytest.fixture(scope="module")
def daemons(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    directory = tmp_path_factory.mktemp("traces")
    with Daemons(directory, environment=collector.environment()) as running:
        yield running


def test_one_save_is_one_trace_over_three_kinds_of_process(
    collector: Collector, daemons: Daemons, tmp_path: Path
) -> None:
    checkpoint = f"{tmp_path}/step-4"
    environment = {**daemons.env(CHECKPOINT=checkpoint), **collector.environment()}
    with start_ranks(TRAINER, 2, environment, torchrun=False) as ranks:
        ranks.wait(90).check()
    save = await_save(daemons.coordinator.address, checkpoint, lambda each: bool(each.id)).save
    spans = all_of(collector, save, {"pannier-client", "pannier-sidecar", "pannier-coordinator"})
    root = one(spans, "save")
    assert (root.span_id, root.parent) == (tracing.span_id(save), 0)
    assert root.service == "pannier-coordinator"
    assert root.attributes["pannier.state"] == "COMMITTED"
    assert root.attributes["pannier.checkpoint"] == checkpoint
    assert names(spans, root) == {"plan", "ingest", "upload", "commit", "async_save"}
    own = {each.attributes["pannier.rank"]: each for each in spans if each.name == "async_save"}
    assert own.keys() == {0, 1}
    for rank, each in own.items():
        assert (each.span_id, each.parent) == (tracing.span_id(save, rank), root.span_id)
        uploads = {name for name in names(spans, each) if name.startswith("upload ")}
        assert uploads
        # What its client did, and what its sidecar did for it.
        phases = {"plan", "stage", "ingest", "write receipt", "commit"}
        assert names(spans, each) == uploads | phases
        # The client's until the sidecar's acknowledgement, and the sidecar's own.
        assert services(spans, each, "ingest") == ["pannier-client", "pannier-sidecar"]
        assert each.attributes["pannier.bytes"] >= 400_000
    assert {each.trace_id for each in spans} == {tracing.trace_id(save)}
    assert not any(each.error for each in spans)
    for each in spans:
        # Clocks are those of one host, but are read at different moments.
        assert each.end >= each.begin
        assert each.begin >= min(s.begin for s in own.values()) - 50 * MS, each
        assert each.end <= root.end + 5000 * MS, each


def test_a_storage_writers_save_is_a_trace_too(
    collector: Collector, daemons: Daemons, tmp_path: Path
) -> None:
    checkpoint = f"{tmp_path}/step-5"
    environment = {**daemons.env(CHECKPOINT=checkpoint, WRITER="1"), **collector.environment()}
    with start_ranks(TRAINER, 2, environment, torchrun=False) as ranks:
        ranks.wait(90).check()
    save = await_save(daemons.coordinator.address, checkpoint, lambda each: bool(each.id)).save
    spans = all_of(collector, save, {"pannier-client", "pannier-sidecar", "pannier-coordinator"})
    root = one(spans, "save")
    assert root.attributes["pannier.state"] == "COMMITTED"
    own = {each.attributes["pannier.rank"]: each for each in spans if each.name == "async_save"}
    assert own.keys() == {0, 1}
    for each in own.values():
        assert each.parent == root.span_id
        assert names(spans, each) >= {"stage", "ingest", "write receipt"}
        assert services(spans, each, "ingest") == ["pannier-client", "pannier-sidecar"]
        assert not each.error


def test_an_aborted_save_says_why_in_its_trace(
    collector: Collector, daemons: Daemons, tmp_path: Path
) -> None:
    checkpoint = f"{tmp_path}/step-1"
    with Party([daemons.sidecar.address] * 2) as party:
        party.agree(checkpoint, 1)
        party.hands[1].fail(party.hands[1].context(checkpoint, 1), "it can't")
        status = await_save(
            daemons.coordinator.address, checkpoint, lambda each: each.state == ABORTED
        )
    root = one(all_of(collector, status.save, {"pannier-coordinator"}), "save")
    assert root.attributes["pannier.state"] == "ABORTED"
    assert "rank 1" in root.error
    assert "it can't" in root.error


def test_a_process_ends_though_its_collector_is_not_there() -> None:
    # It would wait for longer than the test may take, by itself.
    assert quiet(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9") != "[]"


QUIET = """
import sys
from pannier.v1 import save_pb2
from pannier.common import tracing

if "--without" in sys.argv:
    sys.modules["opentelemetry.sdk"] = None
tracing.set_up("pannier-test")
save = save_pb2.SaveId(job="j", incarnation="i", group="g", number=1)
tracing.export_rank(save, 0, tracing.Interval("async_save", 0, 1))
tracing.export_save(save, tracing.Interval("save", 0, 1))
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.sdk.trace")))
"""


def quiet(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", QUIET, *arguments],
        env=clean_environment(environment),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    return done.stdout.strip()


def test_nothing_is_loaded_unless_the_environment_asks_and_the_packages_are_there() -> None:
    endpoint = "http://127.0.0.1:9"
    assert quiet() == "[]"
    assert quiet(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SDK_DISABLED="true") == "[]"
    assert quiet(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_TRACES_EXPORTER="none") == "[]"
    assert quiet("--without", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) == "[]"


def test_ids_follow_from_the_save_and_are_never_another_ones() -> None:
    saves = [
        save_pb2.SaveId(job="j", incarnation="i", group="g", number=number) for number in range(99)
    ]
    ids = {tracing.span_id(save, rank) for save in saves for rank in (None, *range(9))}
    assert len(ids) == 990
    assert len({tracing.trace_id(save) for save in saves}) == 99
    assert 0 < tracing.trace_id(saves[0]) < 1 << 128


FORKED = """
from pannier.common import timeouts, tracing
timeouts.TRACES_EXPORT_S = 60.0
from pannier.supervisor.processes import fork
from pannier.v1 import save_pb2

def run():
    with tracing.exporting("pannier-forked"):
        save = save_pb2.SaveId(job="forked", incarnation="i", group="g", number=1)
        tracing.export_save(save, tracing.Interval("save", 0, 1))
    return 7

assert fork(run).wait() == 7
"""


def test_a_forked_daemon_exports_its_last_spans(collector: Collector) -> None:
    # Not by its timer, in the time that this takes.
    environment = {**collector.environment(), "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    subprocess.run(
        [sys.executable, "-c", FORKED],
        env=clean_environment(environment),
        timeout=BOUND_S,
        check=True,
    )
    assert "pannier-forked" in {each.service for each in collector.spans()}


def all_of(collector: Collector, save: save_pb2.SaveId, services: set[str]) -> list[Span]:
    """The save's, once they have come from all these."""

    def complete(found: list[Span]) -> bool:
        reported = {each.service for each in found if each.trace_id == tracing.trace_id(save)}
        known = {each.span_id for each in found}
        parents = {each.parent for each in found if each.parent}
        return reported >= services and parents <= known

    found = until(collector.spans, complete)
    return [each for each in found if each.trace_id == tracing.trace_id(save)]


def one(spans: list[Span], name: str) -> Span:
    (found,) = (each for each in spans if each.name == name)
    return found


def names(spans: list[Span], parent: Span) -> set[str]:
    return {each.name for each in spans if each.parent == parent.span_id}


def services(spans: list[Span], parent: Span, name: str) -> list[str]:
    own = (each for each in spans if each.parent == parent.span_id)
    return sorted(each.service for each in own if each.name == name)
