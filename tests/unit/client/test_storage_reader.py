import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from pannier.client.config import load_settings
from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import MissingError, StorageDir
from pannier.client.loading.metadata_reader import Generation
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.restore.host_copies import HostCopies, HostSurvey
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_sharing import LoadSharing
from pannier.client.restore.local_file import LocalFile
from pannier.client.restore.restore_plan import LoadName, RankNeeds, RankPlan
from pannier.client.restore.shared_blocks import BlockReader
from pannier.common import timeouts
from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    StorageError,
)
from support.actors.scripted_sidecar import wait_until
from support.processes.descriptors import opened
from support.processes.stretch import BOUND_S
from support.states.bits import differences
from support.storage import checkpoints
from support.storage.gcs_server import GcsServer
from support.storage.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_state(seed: int = 0) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(700, 1000, generator=noise),
        "half": torch.randn(33, 7, generator=noise).bfloat16(),
        "scalar": torch.tensor(seed + 0.5),
        "empty": torch.empty(0, 4),
        "flags": torch.rand(11, generator=noise) > 0.5,
        "strided": torch.randn(6, 8, generator=noise).t()[1::2],
        "nested": {"list": [torch.full((3,), seed), "text", 7], "object": {seed, "x"}},
    }


def blank(state: Any) -> Any:
    """The same structure, to be filled."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def load(reader: StorageReader, state: dict[str, Any]) -> dict[str, Any]:
    got: dict[str, Any] = blank(state)
    dcp.load(got, storage_reader=reader, no_dist=True)
    return got


def cause(error: CheckpointException) -> BaseException:
    """What one rank raised."""
    ((found, _),) = error.failures.values()
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-1"
    dcp.save(make_state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def servers(
    server: GcsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[str, Any]]]:
    """URL of a root and storage options by kind of storage."""
    with S3Server() as s3:
        yield {
            "file": (f"file://{tmp_path_factory.mktemp('file')}", None),
            "memory": ("memory://reader", None),
            "gs": ("gs://bucket/run", {"endpoint_url": server.url}),
            "s3": ("s3://bucket/run", s3.options),
        }


@pytest.mark.parametrize("kind", ["file", "memory", "gs", "s3"])
def test_reads_what_torch_wrote_from_any_storage(
    kind: str, servers: dict[str, tuple[str, Any]], checkpoint: Path
) -> None:
    root, options = servers[kind]
    url = f"{root}/step-1"
    upload(checkpoint, url, options)
    reader = StorageReader(f"{url}/", storage_options=options)
    assert reader.checkpoint_id == url
    assert differences(load(reader, make_state()), make_state()) == []


def upload(checkpoint: Path, url: str, options: Any) -> None:
    fs, path = fsspec.url_to_fs(url, **(options or {}))
    fs.makedirs(path, exist_ok=True)
    for file in checkpoint.iterdir():
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())


@pytest.mark.parametrize(
    "fault",
    [{"kind": "delay", "seconds": BOUND_S}, {"kind": "status", "status": 429}, {"kind": "reset"}],
    ids=lambda fault: fault["kind"],
)
def test_a_bucket_that_hangs_refuses_or_cuts_a_request_only_delays_the_load(
    server: GcsServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(timeouts, "STORED_FIRST_STALL_S", 0.5)
    url, options = f"gs://bucket/{fault['kind']}/step-1", {"endpoint_url": server.url}
    upload(checkpoint, url, options)
    progress = LoadProgress()
    reader = StorageReader(url, storage_options=options)
    reader.use_progress(progress)
    server.fault(method="GET", path="distcp", times=1, **fault)
    try:
        assert differences(load(reader, make_state()), make_state()) == []
    finally:
        (rule,) = server.faults()
        server.clear()
        server.release()
        # The request that hung is answered before the server ends.
        wait_until(lambda: not any("pannier-stored" in each.name for each in threading.enumerate()))
    assert rule["hits"] == 1
    if fault["kind"] == "delay":
        assert progress.report().status.hedges >= 1


@pytest.mark.parametrize(
    "arguments",
    [{"thread_count": 3}, {"single_file_per_rank": False}],
    ids=["several files", "a file per item"],
)
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_reads_any_layout_of_files(tmp_path: Path, arguments: dict[str, Any], memory: int) -> None:
    dcp.save(make_state(3), storage_writer=FileSystemWriter(tmp_path, **arguments), no_dist=True)
    reader = StorageReader(tmp_path, thread_count=2, memory_bytes=memory)
    assert differences(load(reader, make_state(3)), make_state(3)) == []


def test_is_used_again_for_another_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "step-2"
    dcp.save(make_state(2), checkpoint_id=other, no_dist=True)
    reader = StorageReader(checkpoint)
    load(reader, make_state())
    got = blank(make_state(2))
    dcp.load(got, checkpoint_id=other, storage_reader=reader, no_dist=True)
    assert reader.checkpoint_id == str(other)
    assert differences(got, make_state(2)) == []


@pytest.mark.filterwarnings("ignore:The argument order of load has been changed")
def test_after_a_load_of_several_ranks_the_spool_may_use_its_files_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "a file of the spool"
    spool.write_bytes(b"some")
    located = restore_pb2.LocatedFile(name="f", size=4)
    committed = records_pb2.DataFile(name="f", size=4, crc32c=0)
    # Not referred to by the test itself.
    held = [HostSurvey(files={"f": LocalFile(located, committed, os.open(spool, os.O_RDONLY))})]
    monkeypatch.setattr(HostCopies, "survey", lambda *_: held.pop())
    reader, sharing = StorageReader(checkpoint), LoadSharing(load_settings)
    reader.use_sidecars(sharing, together=True)
    sharing.survey(
        LoadName("load", str(checkpoint), "attempt", 0),
        Receipts(reader.directory, "attempt"),
        Metadata({}, storage_data={}),
        [],
    )
    assert str(spool) in opened()
    # A user may keep the reader.
    reader.release()
    assert str(spool) not in opened()


def test_dcp_load_takes_it_by_position(checkpoint: Path) -> None:
    got = blank(make_state())
    dcp.load(got, StorageReader(checkpoint), no_dist=True)
    assert differences(got, make_state()) == []


def test_has_the_public_attributes_of_torchs_readers(checkpoint: Path, tmp_path: Path) -> None:
    reader, torchs = StorageReader(checkpoint), FileSystemReader(checkpoint)
    assert (reader.path, type(reader.path)) == (torchs.path, type(torchs.path))
    url = f"file://{checkpoint}"
    assert StorageReader(url).path == FsspecReader(url).path == url
    first = reader.load_id
    assert reader.read_metadata().storage_meta.load_id == first != ""
    reader.reset(tmp_path / "step-2")
    assert reader.path == tmp_path / "step-2"
    assert reader.load_id not in ("", first)


def test_reads_only_what_the_plan_needs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = StorageDir.read_into

    def recording(self: StorageDir, name: str, offset: int, target: memoryview) -> None:
        read.append(len(target))
        original(self, name, offset, target)

    monkeypatch.setattr(StorageDir, "read_into", recording)
    got = {"half": torch.zeros(33, 7, dtype=torch.bfloat16)}
    dcp.load(got, storage_reader=StorageReader(checkpoint), no_dist=True)
    assert differences(got, {"half": make_state()["half"]}) == []
    metadata = StorageReader(checkpoint).read_metadata()
    (place,) = (info for index, info in metadata.storage_data.items() if index.fqn == "half")
    assert read == [place.length]


def test_an_archive_wanted_twice_is_read_once(tmp_path: Path, monkeypatch: Any) -> None:
    """A sharded target takes several parts out of one stored chunk."""
    want = torch.arange(24.0).view(6, 4)
    dcp.save({"w": want}, checkpoint_id=tmp_path, no_dist=True)
    halves = [torch.zeros(3, 4), torch.zeros(3, 4)]

    class Halves(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            (item,) = super().create_local_plan().items
            return LoadPlan(
                [
                    type(item)(
                        type=item.type,
                        dest_index=item.dest_index,
                        dest_offsets=torch.Size([start, 0]),
                        storage_index=item.storage_index,
                        storage_offsets=torch.Size([start, 0]),
                        lengths=torch.Size([3, 4]),
                    )
                    for start in (0, 3)
                ]
            )

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return halves[read_item.dest_offsets[0] // 3]

    read: list[str] = []
    original = StorageDir.read_into

    def recording(self: StorageDir, name: str, offset: int, target: memoryview) -> None:
        read.append(name)
        original(self, name, offset, target)

    monkeypatch.setattr(StorageDir, "read_into", recording)
    dcp.load(
        {"w": torch.zeros(6, 4)},
        storage_reader=StorageReader(tmp_path),
        planner=Halves(),
        no_dist=True,
    )
    assert torch.equal(torch.cat(halves), want)
    assert len(read) == 1


def test_reads_a_rank_of_a_checkpoint_saved_without_collectives(tmp_path: Path) -> None:
    dcp.save(make_state(), checkpoint_id=tmp_path, no_dist=True, use_collectives=False)
    assert differences(load(StorageReader(tmp_path), make_state()), make_state()) == []
    with pytest.raises(MissingError, match="a checkpoint per rank"):
        StorageReader(tmp_path).read_metadata()


class Reversing(StreamTransformExtension):
    """Stores bytes in another form."""

    @staticmethod
    def registry_name() -> str:
        return "reversing"

    @staticmethod
    def from_descriptor(version: str) -> "Reversing":
        return Reversing()

    def get_descriptor(self) -> str:
        return "reversing/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def test_refuses_transformed_items_by_name(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, _extensions=[Reversing()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(tmp_path), {"w": torch.ones(3)})
    assert isinstance(cause(caught.value), InvalidRequestError)
    assert "'w'" in str(cause(caught.value))
    assert "reversing/1" in str(cause(caught.value))


def data_file(checkpoint: Path) -> Path:
    (file,) = checkpoint.glob("*.distcp")
    return file


def stored(checkpoint: Path, fqn: str) -> tuple[Any, Any]:
    """Index and place of a key, as ``.metadata`` has them."""
    data = StorageReader(checkpoint).read_metadata().storage_data
    return next((index, info) for index, info in data.items() if index.fqn == fqn)


def test_names_a_missing_data_file(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(checkpoint), make_state())
    assert isinstance(cause(caught.value), StorageError)
    assert f"{checkpoint}/__0_0.distcp doesn't exist" in str(cause(caught.value))
    assert re.search(r"it holds '[\w.]+', '[\w.]+', '[\w.]+' and 6 more", str(cause(caught.value)))


def test_names_a_cut_data_file(checkpoint: Path) -> None:
    _, place = stored(checkpoint, "large")
    end = place.offset + place.length
    os.truncate(data_file(checkpoint), end - 1)
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(checkpoint), {"large": make_state()["large"]})
    assert isinstance(cause(caught.value), StorageError)
    text = str(cause(caught.value))
    assert f"{checkpoint}/__0_0.distcp ends after {end - 1} bytes" in text
    assert "it holds 'large'" in text


def test_names_the_key_of_a_damaged_archive(checkpoint: Path) -> None:
    index, place = stored(checkpoint, "half")
    with data_file(checkpoint).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"?" * place.length)
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(checkpoint), make_state())
    assert isinstance(cause(caught.value), IntegrityError)
    assert f"'{index.fqn}'" in str(cause(caught.value))


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6])
def test_names_the_key_of_a_damaged_object(checkpoint: Path, at: float) -> None:
    _, place = stored(checkpoint, "nested.object")
    with data_file(checkpoint).open("r+b") as file:
        file.seek(place.offset + int(at * (place.length - 1)))
        file.write(b"?" * min(200, int((1 - at) * place.length) + 1))
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(checkpoint), {"nested": {"object": None}})
    assert isinstance(cause(caught.value), IntegrityError)
    text = str(cause(caught.value))
    assert "'nested.object' can't be read" in text
    assert f"{checkpoint}/__0_0.distcp" in text


def test_what_a_planner_raises_about_a_whole_object_is_its_own(checkpoint: Path) -> None:
    class Choosy(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            raise KeyError("not wanted here")

    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"nested": {"object": None}},
            storage_reader=StorageReader(checkpoint),
            planner=Choosy(),
            no_dist=True,
        )
    assert isinstance(cause(caught.value), KeyError)


@pytest.mark.parametrize("damage", ["size", "checksum"])
def test_metadata_that_is_not_what_was_decided_is_refused(tmp_path: Path, damage: str) -> None:
    attempt = "i1-inc-g0000000a-s1"
    content = checkpoints.write_attempt(tmp_path, attempt)
    reader = StorageReader(tmp_path)
    assert reader.resolve() == content
    reader.release()
    # What is read as another one's place, and as a longer pickle.
    changed = content.replace(b"1.1", b"1.7") if damage == "checksum" else content + b"."
    (tmp_path / ".metadata").write_bytes(changed)
    with pytest.raises(IntegrityError, match=rf"{tmp_path}/\.metadata is not what was committed"):
        StorageReader(tmp_path).resolve()
    # A copy without its records says nothing against it.
    shutil.rmtree(tmp_path / ".pannier")
    assert StorageReader(tmp_path).resolve() == changed


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../secret", ".."])
def test_refuses_files_outside_the_checkpoint(checkpoint: Path, path: str) -> None:
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException) as caught:
        load(StorageReader(checkpoint), make_state())
    assert isinstance(cause(caught.value), InvalidRequestError)
    assert "outside the checkpoint" in str(cause(caught.value))


def test_a_tensor_of_another_size_is_refused(checkpoint: Path) -> None:
    class Flattening(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.zeros(5)

    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"half": torch.zeros(33, 7, dtype=torch.bfloat16)},
            storage_reader=StorageReader(checkpoint),
            planner=Flattening(),
            no_dist=True,
        )
    assert isinstance(cause(caught.value), InvalidRequestError)


# Generations.


def test_a_checkpoint_replaced_between_the_ranks_is_refused(checkpoint: Path) -> None:
    first, second, third = (StorageReader(checkpoint) for _ in range(3))
    first.read_metadata()
    third.read_metadata()
    shutil.rmtree(checkpoint)
    dcp.save(make_state(5), checkpoint_id=checkpoint, no_dist=True)
    second.read_metadata()
    plans = []
    for rank, reader in enumerate((first, second, third)):
        plan = reader.prepare_local_plan(LoadPlan([]))
        assert isinstance(plan.storage_data, Generation)
        # The plans travel between ranks as pickles.
        plan.storage_data = pickle.loads(pickle.dumps(plan.storage_data._replace(rank=rank)))
        plans.append(plan)
    with pytest.raises(InvalidRequestError, match=r"ranks \[0, 2\].*ranks \[1\]"):
        first.prepare_global_plan(plans)
    assert first.prepare_global_plan([plans[0], plans[2]]) == [plans[0], plans[2]]


def test_ranks_that_read_different_checkpoints_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    plans = []
    for path in (checkpoint, tmp_path / "copy"):
        reader = StorageReader(path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(InvalidRequestError, match=r"different checkpoints.*copy"):
        reader.prepare_global_plan(plans)


# What ranks share.


class Sharing:
    """Has nothing in a spool, and plans that the first rank takes everything through sidecars."""

    def __init__(self) -> None:
        self.together = False
        self.host = "node-1"
        self.local_files: dict[str, LocalFile] = {}
        self.planned: list[RankNeeds] = []
        self.opened: list[RankPlan] = []

    def locate(self, receipts: Receipts, names: Sequence[str]) -> dict[str, LocalFile]:
        raise AssertionError("of a load of one rank")

    def survey(
        self, load: LoadName, receipts: Receipts, metadata: Metadata, items: Sequence[ReadItem]
    ) -> RankNeeds:
        return RankNeeds(load.rank, None)

    def plan(self, receipts: Receipts, needs: Sequence[RankNeeds]) -> list[RankPlan | None]:
        self.planned += needs
        return [RankPlan((), None, {}), *[None] * (len(needs) - 1)]

    def open_blocks(self, plan: RankPlan, progress: LoadProgress) -> BlockReader | None:
        self.opened.append(plan)
        return None

    def close(self) -> None:
        self.local_files.clear()


def test_what_ranks_share_travels_with_their_plans_and_is_not_missed_where_a_planner_drops_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [StorageReader(checkpoint) for _ in range(3)]
    sharing = [Sharing() for _ in readers]
    plans = []
    for reader, mine in zip(readers, sharing, strict=True):
        reader.use_sidecars(mine, together=True)
        monkeypatch.setattr(reader._directory, "is_local", False)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(blank(make_state()), reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = pickle.loads(pickle.dumps(plans))
    # The second rank's planner makes plans of its own.
    plans[1] = LoadPlan(plans[1].items)
    final = readers[0].prepare_global_plan(plans)
    assert len(sharing[0].planned) == 2
    for reader, mine, plan in zip(readers, sharing, final, strict=True):
        got, planner = blank(make_state()), DefaultLoadPlanner()
        planner.set_up_planner(got, reader.read_metadata(), True)
        reader.read_data(planner.finish_plan(plan), planner)
        assert differences(got, make_state()) == []
        assert len(mine.opened) == (mine is sharing[0])


# No checkpoint.


def test_says_that_a_directory_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="it doesn't exist"):
        StorageReader(tmp_path / "nothing").read_metadata()


def test_says_which_attempts_are_under_way_or_aborted(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    checkpoints.write_attempt(path, "i1-inc-g0000000a-s7", commit=False)
    checkpoints.write_attempt(path, "i1-inc-g0000000a-s8", commit=False)
    checkpoints.write_decision(path, "i1-inc-g0000000a-s7", records_pb2.OUTCOME_ABORT)
    with pytest.raises(MissingError) as caught:
        StorageReader(path).read_metadata()
    text = str(caught.value)
    assert "i1-inc-g0000000a-s8 is in progress" in text
    assert "i1-inc-g0000000a-s7 was aborted" in text


def test_says_that_an_attempt_is_about_to_be_committed(tmp_path: Path) -> None:
    checkpoints.write_attempt(tmp_path, "i1-inc-g0000000a-s7")
    (tmp_path / ".metadata").unlink()
    with pytest.raises(MissingError, match="i1-inc-g0000000a-s7 has a COMMIT decision"):
        StorageReader(tmp_path).read_metadata()


def test_says_what_is_there_instead_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(MissingError, match=r"only model\.bin"):
        StorageReader(tmp_path).read_metadata()


@pytest.mark.skipif(
    torch.__version__ < "2.10", reason="dcp.load of torch 2.9 keeps the reason to itself"
)
def test_dcp_load_shows_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="is no checkpoint: it doesn't exist"):
        load(StorageReader(tmp_path / "nothing"), {"w": torch.ones(1)})


# Arguments.


@pytest.mark.parametrize("path", ["", "nonsense://x/y", b"/bytes"])
def test_refuses_what_is_no_path(path: Any) -> None:
    with pytest.raises(InvalidRequestError):
        StorageReader(path)
    assert not StorageReader.validate_checkpoint_id(path)


@pytest.mark.parametrize(
    "path", ["relative/step-1", "/absolute", "file:///a", "gs://b/x", "memory://m", Path("/p")]
)
def test_takes_paths_and_urls(path: Any) -> None:
    assert StorageReader.validate_checkpoint_id(path)


@pytest.mark.parametrize("argument", ["thread_count", "memory_bytes"])
def test_refuses_bounds_of_nothing(argument: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=argument):
        StorageReader(tmp_path, **{argument: 0})  # type: ignore[arg-type]


def test_wrong_storage_options_are_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="storage_options"):
        StorageReader("gs://bucket/x", storage_options={"access": "nonsense"})


def test_a_relative_path_stays_where_it_was(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    reader = StorageReader("step-1")
    monkeypatch.chdir("/")
    assert differences(load(reader, make_state()), make_state()) == []


@pytest.mark.parametrize("setting", [None, "true"])
def test_gcsfs_layout_lookup_is_off_unless_the_user_wants_it(setting: str | None) -> None:
    script = """
        import os
        from pannier.client.loading.storage_reader import StorageReader
        reader = StorageReader("gs://bucket/x")
        print(os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"], type(reader._directory._fs).__name__)
    """
    name = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    env = {key: value for key, value in os.environ.items() if key != name}
    env["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:9"
    if setting is not None:
        env[name] = setting
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in script.splitlines())],
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=True,
    )
    expected = "true ExtendedGcsFileSystem" if setting else "false GCSFileSystem"
    assert done.stdout.split("\n")[0] == expected


def test_an_emulators_address_comes_from_the_environment(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsServer(tmp_path / "gcs") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        fs, path = fsspec.url_to_fs("gs://bucket/step-1", endpoint_url=server.url, token="anon")
        for file in checkpoint.iterdir():
            fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
        assert (
            differences(load(StorageReader("gs://bucket/step-1"), make_state()), make_state()) == []
        )
        with pytest.raises(MissingError, match="step-2 is no checkpoint"):
            StorageReader("gs://bucket/step-2").read_metadata()
        with pytest.raises(PannierError, match="gs://nowhere/step-1"):
            StorageReader("gs://nowhere/step-1").read_metadata()


def test_objects_reach_the_planner_as_they_were_written(tmp_path: Path) -> None:
    dcp.save({"text": "x"}, checkpoint_id=tmp_path, no_dist=True)
    seen: list[bytes] = []

    class Recording(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(value.getvalue())
            super().load_bytes(read_item, value)

    got = {"text": ""}
    dcp.load(got, storage_reader=StorageReader(tmp_path), planner=Recording(), no_dist=True)
    assert got == {"text": "x"}
    assert seen == [data_file(tmp_path).read_bytes()]
