"""``pannier status`` and ``watch`` against a daemon with scripted answers."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format

from pannier.common import timeouts
from pannier.common.message_json import timestamp
from pannier.v1 import load_status_pb2, save_pb2, status_pb2, status_pb2_grpc
from support.processes.cli import pannier, pannier_here, pannier_in_terminal
from support.processes.daemons import short_directory
from support.processes.stretch import BOUND_S

ID = "job/inc/g1a2b3c4d/7"


def save(
    state: save_pb2.SaveState, phase: save_pb2.RankPhase, name: str = ID
) -> save_pb2.SaveStatus:
    status = save_pb2.SaveStatus(
        save=save_pb2.SaveId(job="job", incarnation="inc", group="g1a2b3c4d", number=7),
        id=name,
        checkpoint_id="gs://bucket/run/step-100",
        state=state,
        bytes_total=3 << 30,
        created_at=timestamp(1.0),
        planned_s=0.25,
        group_size=2,
        durable_ranks=1 + (phase == save_pb2.RANK_PHASE_DURABLE),
    )
    status.ranks.add(
        rank=0, host="node-0", phase=save_pb2.RANK_PHASE_DURABLE, bytes_durable=1 << 30
    )
    status.ranks.add(
        rank=1,
        host="node-1",
        phase=phase,
        bytes_staged=2 << 30,
        retries=4,
        last_error="503 from storage",
        seconds_since_seen=12,
    )
    if state == save_pb2.SAVE_STATE_UPLOADING:
        status.waiting_on.ranks.append(1)
        status.waiting_on.text = "rank 1 (host node-1, last seen 12 s ago)"
        status.waiting_on.deadline_s = 100
    if state == save_pb2.SAVE_STATE_ABORTED:
        status.failures.add(
            rank=1, host="node-1", kind=save_pb2.FAILURE_KIND_STORAGE, message="no such bucket"
        )
    return status


UPLOADING = save(save_pb2.SAVE_STATE_UPLOADING, save_pb2.RANK_PHASE_INGESTED)
COMMITTED = save(save_pb2.SAVE_STATE_COMMITTED, save_pb2.RANK_PHASE_DURABLE)
ABORTED = save(save_pb2.SAVE_STATE_ABORTED, save_pb2.RANK_PHASE_FAILED)
PREPARED = save(save_pb2.SAVE_STATE_PREPARED, save_pb2.RANK_PHASE_PLANNED, "job/inc/g1a2b3c4d/8")


def load(state: load_status_pb2.LoadState, name: str = "load-1234") -> load_status_pb2.LoadStatus:
    status = load_status_pb2.LoadStatus(
        id=name,
        checkpoint_id="gs://bucket/run/step-100",
        state=state,
        created_at=timestamp(1.0),
        seconds=3.5,
        group_size=2,
        bytes_total=4 << 30,
        bytes_read=3 << 30,
        hedges=1,
    )
    status.sources.add(source="own spool", files=5, bytes=2 << 30)
    status.sources.add(source="node-3", files=1, bytes=1 << 30)
    for rank in range(2):
        made = status.ranks.add(
            rank=rank, host=f"node-{rank}", bytes_total=2 << 30, seconds_since_seen=0.5
        )
        made.phase = load_status_pb2.LOAD_PHASE_READING
        made.sources.add(source="own spool", files=5, bytes=1 << 30)
    if state == load_status_pb2.LOAD_STATE_LOADING:
        status.waiting_on.text = "rank 1 (host node-1, last seen 12 s ago)"
        status.waiting_on.ranks.append(1)
    if state == load_status_pb2.LOAD_STATE_FAILED:
        status.failures.add(
            rank=1,
            host="node-1",
            kind=save_pb2.FAILURE_KIND_LOST,
            message="process 7 of rank 1 on host node-1 died while it loaded",
        )
    return status


LOADING = load(load_status_pb2.LOAD_STATE_LOADING)
LOADED = load(load_status_pb2.LOAD_STATE_LOADED)
FAILED = load(load_status_pb2.LOAD_STATE_FAILED)


class Scripted(status_pb2_grpc.StatusServicer):
    """Answers with ``saves``; a watcher gets the next of ``episodes``, which then breaks off.

    An empty episode, and each after the last one, is an error: ``refusal``.
    """

    def __init__(
        self,
        saves: Sequence[save_pb2.SaveStatus] = (),
        episodes: Sequence[Sequence[save_pb2.SaveStatus]] = (),
    ) -> None:
        self.saves = list(saves)
        self.backlog = (0, 0.0)
        self.limited = False
        self.episodes = [list(episode) for episode in episodes]
        self.refusal = grpc.StatusCode.NOT_FOUND
        self.hangs = False
        """Whether a stream never ends after its episode, as that of a stopped daemon."""
        self.loads: list[load_status_pb2.LoadStatus] = []
        """Of ``WatchLoad``: one after the other."""
        self.asked: list[object] = []

    def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: grpc.ServicerContext
    ) -> status_pb2.ListSavesResponse:
        self.asked.append(request)
        return status_pb2.ListSavesResponse(
            saves=self.saves,
            daemon_state="serving",
            host="node-0",
            version="1.2.3",
            bytes_queued=self.backlog[0],
            oldest_upload_s=self.backlog[1],
            upload_limit=500 << 20,
            upload_limited=self.limited,
            loads=self.loads[:1],
        )

    def GetSave(
        self, request: status_pb2.GetSaveRequest, context: grpc.ServicerContext
    ) -> status_pb2.GetSaveResponse:
        self.asked.append(request)
        for known in self.saves:
            if request.id in (known.id, known.checkpoint_id):
                return status_pb2.GetSaveResponse(save=known)
        context.abort(grpc.StatusCode.NOT_FOUND, f"no save {request.id}")
        raise AssertionError

    def WatchSave(
        self, request: status_pb2.WatchSaveRequest, context: grpc.ServicerContext
    ) -> Iterator[status_pb2.WatchSaveResponse]:
        self.asked.append(request)
        episode = self.episodes.pop(0) if self.episodes else []
        if not episode:
            context.abort(self.refusal, f"no save {request.id}")
        for status in episode:
            yield status_pb2.WatchSaveResponse(save=status)
        if self.hangs:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(BOUND_S)
        if self.episodes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    def GetLoad(
        self, request: status_pb2.GetLoadRequest, context: grpc.ServicerContext
    ) -> status_pb2.GetLoadResponse:
        for known in self.loads:
            if request.id in (known.id, known.checkpoint_id):
                return status_pb2.GetLoadResponse(load=known)
        context.abort(grpc.StatusCode.NOT_FOUND, f"no load {request.id}")
        raise AssertionError

    def WatchLoad(
        self, request: status_pb2.WatchLoadRequest, context: grpc.ServicerContext
    ) -> Iterator[status_pb2.WatchLoadResponse]:
        known = [status for status in self.loads if request.id in (status.id, status.checkpoint_id)]
        if not known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no load {request.id}")
        for status in known:
            yield status_pb2.WatchLoadResponse(load=status)


Serve = Callable[[Scripted], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a daemon; gives its address."""
    directory = short_directory()
    servers = []

    def start(servicer: Scripted) -> str:
        server = grpc.server(ThreadPoolExecutor(4))
        status_pb2_grpc.add_StatusServicer_to_server(servicer, server)
        address = f"unix://{directory}/{len(servers)}.sock"
        server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return address

    with _removed(directory):
        yield start
        for server in servers:
            server.stop(0).wait()


@contextmanager
def _removed(directory: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def test_status_is_a_table_of_saves(serve: Serve) -> None:
    result = pannier("status", "--address", serve(Scripted([UPLOADING, COMMITTED])))
    assert result.code == 0, result
    assert "on node-0, job job: serving, pannier 1.2.3" in result.out
    lines = [line for line in result.out.splitlines() if ID in line]
    assert "UPLOADING" in lines[0]
    assert "1 of 2" in lines[0]
    assert "3.0 GiB" in lines[0]
    assert "gs://bucket/run/step-100" in lines[0]
    assert "COMMITTED" in lines[1]
    waits = "rank 1 (host node-1, last seen 12 s ago)"
    assert waits not in pannier("status", "--address", serve(Scripted([COMMITTED]))).out
    wide = pannier("status", "-o", "wide", "--address", serve(Scripted([UPLOADING])))
    assert waits in wide.out


def test_status_says_what_waits_for_storage(serve: Serve) -> None:
    daemon = Scripted([UPLOADING])
    address = serve(daemon)
    assert "to upload" not in pannier("status", "--address", address).out
    daemon.backlog = (3 << 30, 12.3)
    out = pannier("status", "--address", address).out
    assert "3.0 GiB to upload, the oldest for 12 s\n" in out
    daemon.limited = True
    out = pannier("status", "--address", address).out
    assert "the oldest for 12 s; --upload-limit, 500.0 MiB/s, is what limits\n" in out


def test_the_address_comes_from_the_environment(serve: Serve) -> None:
    result = pannier("status", env={"PANNIER_SIDECAR": serve(Scripted())})
    assert (result.code, "no saves" in result.out) == (0, True), result


def test_the_default_address_is_the_embedded_sidecars() -> None:
    directory = short_directory()
    directory.rmdir()
    result = pannier("status", env={"PANNIER_RUNTIME_DIR": str(directory)})
    assert result.code == 3
    assert "no daemon runs here: it leaves 5 minutes after the last trainer" in result.err
    assert f"unix://{directory}/sidecar.sock" in result.err
    assert "checkpoints: `pannier ls ROOT`" in result.err


def test_status_json_is_the_protos_json(serve: Serve) -> None:
    result = pannier("status", "--json", "--address", serve(Scripted([UPLOADING])))
    answer = result.json()
    parsed = json_format.ParseDict(answer, status_pb2.ListSavesResponse())
    assert parsed.saves[0] == UPLOADING
    save = answer["saves"][0]
    # `plan` is for clients and sidecars.
    fields = {field.name for field in save_pb2.SaveStatus.DESCRIPTOR.fields}
    assert set(save) == fields - {"plan"}
    assert save["created_at"] == "1970-01-01T00:00:01Z"
    assert save["state"] == "SAVE_STATE_UPLOADING"
    assert (save["bytes_total"], save["save"]["number"]) == (3 << 30, 7)
    assert save["failures"] == []


def committed(number: int, stalled_s: float, job: str = "job") -> save_pb2.SaveStatus:
    status = save_pb2.SaveStatus()
    status.CopyFrom(COMMITTED)
    status.save.job, status.save.number, status.id = job, number, f"{job}/inc/g1a2b3c4d/{number}"
    status.ingested_s, status.committed_s = 0.5, 2.0
    status.ranks[0].stalled_s, status.ranks[1].stalled_s = stalled_s / 2, stalled_s
    return status


def test_status_shows_what_saves_cost_and_how_often_to_save(serve: Serve) -> None:
    # A restarted daemon doesn't know when this one began.
    unknown = committed(1, 7.0)
    unknown.committed_s = 0
    saves = [UPLOADING, committed(9, 0.2), committed(4, 0.3, "other"), committed(8, 0.1), unknown]
    address = serve(Scripted(saves))
    out = pannier("status", "--address", address).out
    assert (
        "job, 2 ranks (group g1a2b3c4d): a save costs 0.1 s of training and is durable after 2.1 s (2 saves); "
        "no load was measured\n"
    ) in out
    assert "other, 2 ranks (group g1a2b3c4d): a save costs 0.3 s " in out
    advised = pannier("status", "--address", address, "--mtbf", "1d 12h", columns=80)
    assert all(len(line) <= 80 for line in advised.out.splitlines())
    sentences = " ".join(advised.out.split())
    assert "job, 2 ranks (group g1a2b3c4d): save every 2 min 41 s: a save costs" in sentences
    assert "no load was measured: a restore is assumed to take 2.1 s" in sentences
    assert "at one failure in 1 d 12 h, each of a whole host, 0.062 % of the time" in sentences


def test_status_without_a_measured_save_says_that_it_has_no_advice(serve: Serve) -> None:
    address = serve(Scripted([UPLOADING, COMMITTED]))
    assert "how often" not in pannier("status", "--address", address).out
    result = pannier("status", "--address", address, "--mtbf", "6h")
    assert (result.code, "how often to save isn't known" in result.out) == (0, True), result


def test_advice_in_json_is_beside_the_protos_fields(serve: Serve) -> None:
    address = serve(Scripted([committed(9, 0.2)]))
    assert "advice" not in pannier("status", "--json", "--address", address).json()
    for words in ((), (committed(9, 0.2).id,)):
        answer = pannier("status", *words, "--json", "--mtbf", "6h", "--address", address).json()
        (advice,) = answer.pop("advice")
        message = status_pb2.GetSaveResponse() if words else status_pb2.ListSavesResponse()
        json_format.ParseDict(answer, message)
        loss, loss_in_place = advice.pop("loss"), advice.pop("loss_in_place")
        assert 0 < loss["saves"] < loss["failures"] < 0.01
        assert loss_in_place["failures"] < loss["failures"]
        assert advice == {
            "job": "job",
            "group": "g1a2b3c4d",
            "ranks": 2,
            "saves": 1,
            "cost": {"stalled_s": 0.2, "ingested_s": 0.7, "durable_s": 2.2},
            "restore_s": 2.2,
            "restores": 0,
            "mtbf_s": 21600,
            "interval_s": pytest.approx(93, abs=0.5),
        }


@pytest.mark.parametrize("mtbf", ["6", "never", "0.5s"])
def test_a_mean_time_between_failures_that_is_none_exits_with_2(serve: Serve, mtbf: str) -> None:
    result = pannier("status", "--mtbf", mtbf, "--address", serve(Scripted([committed(9, 0.2)])))
    assert result.code == 2, result
    assert "a mean time between failures of" in result.err or "--mtbf" in result.err


def test_status_filters_reach_the_daemon(serve: Serve) -> None:
    daemon = Scripted()
    flags = ["--job", "j", "--state", "aborted", "--state", "in_doubt", "--limit", "5"]
    assert pannier("status", *flags, "--address", serve(daemon)).code == 0
    states = [save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_IN_DOUBT]
    assert daemon.asked == [status_pb2.ListSavesRequest(job="j", states=states, limit=5)]


def test_status_of_one_save_shows_ranks_and_whom_it_waits_for(serve: Serve) -> None:
    address = serve(Scripted([UPLOADING]))
    result = pannier("status", ID, "--address", address)
    assert result.code == 0, result
    assert "waiting for rank 1 (host node-1, last seen 12 s ago)" in result.out
    rank = next(line for line in result.out.splitlines() if "503 from storage" in line)
    assert "node-1" in rank
    assert "INGESTED" in rank
    by_checkpoint = pannier("status", "gs://bucket/run/step-100", "--address", address, "--json")
    assert json_format.ParseDict(by_checkpoint.json(), status_pb2.GetSaveResponse()).save.id == ID


def test_ranks_that_another_host_has_too_are_shown_where_there_are_any(serve: Serve) -> None:
    replicated = save_pb2.SaveStatus()
    replicated.CopyFrom(UPLOADING)
    replicated.replicated_ranks = 1
    for rank, size in zip(replicated.ranks, (1 << 30, 1 << 20), strict=True):
        rank.replica_host, rank.bytes_replicated = f"holder-{1 - rank.rank}", size
    address = serve(Scripted([replicated]))
    listed = pannier("status", "--address", address).out
    assert "replicated" in listed
    assert "1 of 2" in listed
    shown = pannier("status", ID, "--address", address, "-o", "wide").out
    assert "replicated 1 of 2 ranks" in shown
    line = next(line for line in shown.splitlines() if "503 from storage" in line)
    assert "holder-0" in line
    assert "1.0 MiB" in line
    assert "replicated" not in pannier("status", "--address", serve(Scripted([UPLOADING]))).out


def test_an_unknown_save_is_a_negative_answer(serve: Serve) -> None:
    address = serve(Scripted([UPLOADING]))
    for command in ("status", "watch"):
        result = pannier(command, "no/such/save/1", "--address", address)
        assert result.code == 1, result
        assert "no save no/such/save/1" in result.err
        assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["status", "watch"])
def test_no_daemon_exits_with_3_and_a_hint(command: str) -> None:
    result = pannier(command, "--address", "unix:///tmp/pannier-no-such.sock")
    assert result.code == 3
    assert "at unix:///tmp/pannier-no-such.sock: no such file" in result.err
    assert "hint: correct --address" in result.err
    assert result.out == ""


@pytest.mark.parametrize(("end", "code"), [(COMMITTED, 0), (ABORTED, 1)])
def test_watch_ends_with_the_save(serve: Serve, end: save_pb2.SaveStatus, code: int) -> None:
    result = pannier("watch", ID, "--address", serve(Scripted(episodes=[[UPLOADING, end]])))
    assert result.code == code, result
    first, second, *details = result.out.splitlines()
    assert first == f"{ID} UPLOADING: 1 of 2 ranks durable, 30 % uploaded, waiting for ranks [1]"
    outcome = "COMMITTED" if code == 0 else "ABORTED"
    assert second == f"{ID} {outcome}: {2 - code} of 2 ranks durable"
    assert details[:2] == [f"step-100  {outcome}  {ID}", "gs://bucket/run/step-100"]
    assert ("no such bucket" in result.out) == bool(code)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_gets_bars_that_fit_it_and_then_the_details(serve: Serve, columns: int) -> None:
    address = serve(Scripted(episodes=[[UPLOADING], [UPLOADING, COMMITTED]]))
    result = pannier_in_terminal("watch", ID, "--address", address, columns=columns)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert all(len(line) <= columns for line in lines), result
    bar = next(line for line in lines if line.startswith("rank 1  node-1 INGESTED"))
    assert re.search(" ━*╸? * 0 % ", bar)
    assert any(
        line.startswith("waiting for rank 1 (host node-1, last seen 12 s ago)") for line in lines
    )
    assert f"step-100  COMMITTED  {ID}" in lines
    assert "\x1b" not in result.out


def test_watch_json_is_one_status_per_line(serve: Serve) -> None:
    address = serve(Scripted(episodes=[[UPLOADING, UPLOADING, COMMITTED]]))
    result = pannier("watch", ID, "--json", "--address", address)
    assert result.code == 0
    seen = [json_format.ParseDict(line, save_pb2.SaveStatus()) for line in result.json_lines()]
    assert seen == [UPLOADING, UPLOADING, COMMITTED]


def test_watch_goes_on_after_the_daemon_was_away(serve: Serve) -> None:
    address = serve(Scripted(episodes=[[UPLOADING], [UPLOADING, COMMITTED]]))
    result = pannier("watch", ID, "--json", "--address", address)
    assert result.code == 0, result
    assert len(result.json_lines()) == 3


def test_watch_goes_on_when_a_restarted_daemon_knows_the_save_again(serve: Serve) -> None:
    address = serve(Scripted(episodes=[[UPLOADING], [], [UPLOADING, COMMITTED]]))
    result = pannier("watch", ID, "--json", "--address", address)
    assert result.code == 0, result
    assert len(result.json_lines()) == 3


@pytest.mark.parametrize(
    ("refusal", "code", "says"),
    [
        (grpc.StatusCode.NOT_FOUND, 1, f"no save {ID}"),
        (grpc.StatusCode.UNAVAILABLE, 3, "can't be reached"),
    ],
)
def test_watch_ends_when_a_daemon_does_not_return(
    serve: Serve, refusal: grpc.StatusCode, code: int, says: str
) -> None:
    daemon = Scripted(episodes=[[UPLOADING]])
    daemon.refusal = refusal
    scale = {"PANNIER_TIME_SCALE": "0.05"}
    result = pannier("watch", ID, "--address", serve(daemon), env=scale)
    assert result.code == code, result
    assert says in result.err
    # It pauses between the tries.
    assert 1 < len(daemon.asked) < 200


def test_watch_ends_when_a_daemon_does_not_respond_any_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "WATCH_STREAM_S", 4.0)
    monkeypatch.setattr(timeouts, "WATCH_RECONNECT_S", 0.2)
    # The second is as that of a daemon that is only quiet.
    daemon = Scripted(episodes=[[UPLOADING], [UPLOADING]])
    daemon.hangs = True
    daemon.refusal = grpc.StatusCode.UNAVAILABLE
    result = pannier_here("watch", ID, "--json", "--address", serve(daemon))
    assert result.code == 3, result
    assert len(result.json_lines()) == 2


def test_a_checkpoint_is_named_as_users_write_it(serve: Serve) -> None:
    daemon = Scripted([COMMITTED], [[COMMITTED]])
    address = serve(daemon)
    written = COMMITTED.checkpoint_id.replace("gs:", "GS:") + "/"
    assert pannier("status", written, "--address", address).code == 0
    assert pannier("watch", written, "--address", address).code == 0
    assert daemon.asked[-1] == status_pb2.WatchSaveRequest(id=COMMITTED.checkpoint_id)


def test_watch_in_a_terminal_without_controls_prints_lines(serve: Serve) -> None:
    daemon = Scripted(episodes=[[UPLOADING, COMMITTED]])
    shown = pannier_in_terminal("watch", ID, "--address", serve(daemon), columns=200, term="dumb")
    assert "UPLOADING" in shown.out


def test_watch_without_a_save_takes_the_newest_under_way(serve: Serve) -> None:
    other = save(save_pb2.SAVE_STATE_ABORTED, save_pb2.RANK_PHASE_FAILED, "job/inc/g1a2b3c4d/8")
    daemon = Scripted([other, UPLOADING], [[COMMITTED]])
    assert pannier("watch", "--address", serve(daemon)).code == 0
    assert daemon.asked[-1] == status_pb2.WatchSaveRequest(id=ID)


def test_watch_of_a_prepared_save_is_a_success(serve: Serve) -> None:
    daemon = Scripted(episodes=[[PREPARED]])
    assert pannier("watch", PREPARED.id, "--address", serve(daemon)).code == 0


def test_watch_without_a_save_takes_a_prepared_one_only_if_there_is_no_other(serve: Serve) -> None:
    for saves, expected in (([PREPARED, COMMITTED], COMMITTED), ([PREPARED], PREPARED)):
        daemon = Scripted(saves, [[expected]])
        assert pannier("watch", "--address", serve(daemon)).code == 0
        assert daemon.asked[-1] == status_pb2.WatchSaveRequest(id=expected.id)


def test_watch_of_a_forgotten_save_does_not_turn_to_a_load_of_its_checkpoint(serve: Serve) -> None:
    daemon = Scripted(episodes=[[UPLOADING]])
    daemon.loads = [LOADED]
    scale = {"PANNIER_TIME_SCALE": "0.05"}
    result = pannier("watch", UPLOADING.checkpoint_id, "--address", serve(daemon), env=scale)
    assert result.code == 1, result
    assert f"no save {UPLOADING.checkpoint_id}" in result.err


def test_watch_without_any_save_is_a_negative_answer(serve: Serve) -> None:
    result = pannier("watch", "--address", serve(Scripted()))
    assert result.code == 1
    assert "has no saves" in result.err


def test_status_lists_loads_and_shows_one(serve: Serve) -> None:
    daemon = Scripted([UPLOADING])
    daemon.loads = [LOADING]
    address = serve(daemon)
    listed = pannier("status", "--address", address)
    assert re.search(
        r"step-100 +LOADING +3.0 GiB +3.5 s +2.0 GiB own spool, 1.0 GiB node-3 +rank 1", listed.out
    )
    answer = pannier("status", "--json", "--address", address).json()
    assert json_format.ParseDict(answer, status_pb2.ListSavesResponse()).loads[0] == LOADING
    shown = pannier("status", "load-1234", "--address", address)
    assert shown.code == 0, shown
    assert "waiting for rank 1 (host node-1, last seen 12 s ago)" in shown.out
    assert "3.5 s; 2.0 GiB own spool, 1.0 GiB node-3; 1 hedge" in shown.out
    assert len(re.findall("READING +1.0 GiB +2.0 GiB +1.0 GiB own spool", shown.out)) == 2
    details = pannier("status", "load-1234", "--json", "--address", address).json()
    assert json_format.ParseDict(details, status_pb2.GetLoadResponse()).load == LOADING


@pytest.mark.parametrize(("end", "code"), [(LOADED, 0), (FAILED, 1)])
def test_watch_ends_with_the_load(serve: Serve, end: load_status_pb2.LoadStatus, code: int) -> None:
    daemon = Scripted()
    daemon.loads = [LOADING, end]
    address = serve(daemon)
    for name in ([], ["load-1234"]):
        result = pannier("watch", *name, "--address", address)
        assert result.code == code, result
        first, second, *details = result.out.splitlines()
        assert first == "load-1234 LOADING: 70 % read, waiting for ranks [1]"
        assert second == f"load-1234 {'FAILED' if code else 'LOADED'}"
        died = "rank 1 (node-1): lost: process 7 of rank 1 on host node-1 died while it loaded"
        assert (died in [each.lower() for each in details]) == bool(code), result
    lines = pannier("watch", "--json", "--address", address).json_lines()
    assert [json_format.ParseDict(each, load_status_pb2.LoadStatus()) for each in lines] == [
        LOADING,
        end,
    ]


def test_watch_in_a_terminal_shows_a_load_with_bars(serve: Serve) -> None:
    daemon = Scripted()
    daemon.loads = [LOADING, LOADED]
    shown = pannier_in_terminal("watch", "load-1234", "--address", serve(daemon), columns=100).out
    assert "rank 0  node-0" in shown
    assert "50 %" in shown


def test_advice_takes_what_restores_of_the_same_ranks_took(serve: Serve) -> None:
    daemon = Scripted([committed(9, 0.2)])
    daemon.loads = [LOADED]
    out = pannier("status", "--address", serve(daemon)).out
    assert "a restore takes 3.5 s (1 load)" in out
