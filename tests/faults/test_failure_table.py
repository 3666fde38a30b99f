"""Every row of the design's table of failures, and the test that kills the real thing.

Rows that no other module has stand here, played by hand at real daemons.
"""

import ast
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError, SaveAbortedError
from support.actors.hand import Party
from support.processes.daemons import Daemons
from support.processes.stretch import stretched
from support.processes.watching import ABORTED, COMMITTED, await_save
from support.storage.gcs_server import GcsServer

ROWS = {
    "a trainer dies before it is ingested": [
        "faults/test_lost_hosts.py::test_trainers_that_die_before_they_are_ingested_end_the_save_at_once_and_by_name",
    ],
    "a trainer dies after it is ingested": [
        "faults/test_lost_hosts.py::test_one_trainer_that_dies_when_it_is_ingested_is_not_missed",
        "integration/test_commit.py::test_a_commit_survives_sigkill_of_all_trainers",
        "integration/test_plan_cache.py::test_a_trainer_that_dies_after_its_hand_over_costs_no_save",
    ],
    "the sidecar is killed": [
        "faults/test_sidecar_restart.py::test_a_half_uploaded_save_is_committed_though_its_trainer_is_dead",
        "faults/test_sidecar_restart.py::test_a_stream_goes_on_at_the_offset_that_the_killed_sidecar_held",
        "faults/test_crash_points.py::test_a_daemon_that_dies_there_loses_nothing_and_leaves_nothing",
    ],
    "the coordinator is killed": [
        "faults/test_restarts.py::test_a_killed_coordinator_commits_what_was_ingested",
        "faults/test_crash_points.py::test_a_daemon_that_dies_there_loses_nothing_and_leaves_nothing",
    ],
    "the host is lost after ingestion, before durability": [
        "faults/test_lost_hosts.py::test_a_host_that_is_lost_before_it_is_durable_is_named_at_the_deadline",
        "faults/test_replicas.py::test_what_a_lost_host_had_ingested_is_uploaded_by_the_host_with_its_replica",
        "faults/test_replicas.py::test_a_job_loses_neither_the_checkpoint_nor_its_fast_restart_with_a_host",
    ],
    "network cut between hosts": [
        "faults/test_network.py::test_a_cut_from_the_coordinator_ends_only_saves_whose_deadline_passes_meanwhile",
        "faults/test_network.py::test_a_cut_from_storage_for_seconds_holds_an_upload_up",
    ],
    "storage: 429, 5xx, reset, slow": [
        "faults/test_failure_table.py::test_storage_that_is_busy_resets_or_stalls_is_tried_again",
        "faults/test_slow_storage.py::test_a_cut_upload_goes_on_at_what_the_store_holds_and_nothing_is_sent_twice",
        "faults/test_slow_storage.py::test_a_stalled_upload_is_cut_off_and_goes_on",
        "faults/test_slow_storage.py::test_saves_that_pile_up_take_no_more_than_the_spool_and_are_seen",
    ],
    "parts of a file end together, or an S3 server loses their upload": [
        "unit/storage/test_multipart_upload.py::test_parts_that_end_together_never_take_a_buffer_that_is_in_use",
        "unit/storage/test_multipart_upload.py::test_an_upload_that_the_server_has_lost_is_begun_again_from_the_first_part",
        "unit/storage/test_s3_store.py::test_an_upload_that_s3_loses_or_never_answers_is_made_once_and_leaves_none",
        "store/test_saves.py::test_what_ranks_save_in_many_parts_is_read_by_plain_dcp_and_by_the_client",
    ],
    "storage: 401, 403, 404 bucket": [
        "faults/test_failure_table.py::test_storage_that_refuses_ends_the_save_at_once",
        "faults/test_slow_storage.py::test_a_refusal_in_the_middle_reaches_the_handle_with_rank_host_object_and_cause",
    ],
    "checksum mismatch": [
        "faults/test_failure_table.py::test_a_checksum_mismatch_is_repaired_once_and_reported_the_second_time",
    ],
    "spool or disk full": [
        "integration/test_bad_input.py::test_a_full_spool_is_waited_for_skipped_or_raised",
        "unit/sidecar/test_sidecar_server.py::test_a_full_file_system_is_an_error_before_a_byte_comes",
        "faults/test_spool.py::test_a_disk_that_others_have_filled",
    ],
    "storage is gone for longer than saves live": [
        "faults/test_outage.py::test_no_call_waits_for_storage_that_is_gone_for_longer_than_saves_live",
        "faults/test_outage.py::test_a_plan_that_storage_delays_is_a_skip_where_the_loop_skips",
    ],
    "ranks' structures change independently of each other": [
        "integration/test_changing_structures.py::test_ranks_whose_structures_change_independently_lose_no_save",
        "unit/coordinator/test_plan_choice.py::test_what_a_changed_rank_no_longer_writes_ends_the_save_by_name",
    ],
    "ranks disagree (world size, checkpoint id, group, plan)": [
        "faults/test_failure_table.py::test_ranks_that_disagree_are_named_with_their_values",
        "integration/test_client_in_step.py::test_ranks_of_different_worlds_are_named_with_their_values",
    ],
    "a rank never calls save": [
        "faults/test_failure_table.py::test_a_rank_that_never_calls_save_is_named_at_the_deadline",
    ],
    "a trainer or daemon is stopped (SIGSTOP) and goes on later": [
        "faults/test_trainers.py::test_a_trainer_that_wakes_up_late_changes_nothing_and_gets_an_error",
        "faults/test_lost_hosts.py::test_a_stopped_sidecar_that_wakes_up_after_the_abort_leaves_nothing",
        "faults/test_coordinators.py::test_a_stopped_coordinator_does_not_commit_what_another_has_aborted",
    ],
    "SIGTERM to the sidecar": [
        "faults/test_sidecar_restart.py::test_what_sigterm_finds_pending_is_carried_on_by_the_next_sidecar",
        "unit/sidecar/test_sidecar_server.py::test_draining_takes_no_new_saves_and_finishes_the_old",
    ],
    "the same checkpoint id again": [
        "integration/test_overwrite.py::test_the_first_is_read_until_the_second_is_committed",
        "integration/test_overwrite.py::test_an_overwritten_checkpoint_stays_under_its_reader_and_goes_afterwards",
    ],
    "a coordinator is started again past the plan's deadline": [
        "faults/test_coordinators.py::test_a_save_outlives_its_plan_and_is_committed_by_daemons_that_were_killed_since",
    ],
    "a save expires while the sidecar holds its files": [
        "faults/test_expired_saves.py::test_a_late_hand_over_does_not_commit_what_the_next_save_has_staged",
    ],
    "a save's outcome isn't known when its deadline passes": [
        "unit/client/test_save.py::test_what_may_be_ingested_is_in_doubt_without_a_decision",
        "unit/client/test_save.py::test_a_commit_by_torch_that_is_not_answered_is_in_doubt",
    ],
    "storage can't be reached at the first save": [
        "faults/test_unreachable_storage.py::test_a_first_save_says_soon_that_storage_can_not_be_reached",
        "faults/test_unreachable_storage.py::test_a_save_by_a_known_plan_names_what_storage_said",
    ],
    "a save failed, and its error was not retrieved": [
        "faults/test_earlier_errors.py::test_a_failed_saves_error_is_raised_by_a_later_call_that_saves_on_all_ranks_nevertheless",
    ],
    "a mount hangs": [
        "unit/storage/test_hung_storage.py::test_calls_that_hang_are_abandoned_by_name_and_others_go_on",
        "unit/storage/test_hung_storage.py::test_a_process_ends_though_calls_hang",
    ],
    "two starts of one job save at the same time": [
        "integration/test_incarnations.py::test_the_older_of_two_lives_saves_no_more",
    ],
    "the ranks of one start are divided between two incarnations": [
        "unit/coordinator/test_coordinator_saves.py::test_ranks_that_take_part_in_two_incarnations_are_named_at_once",
    ],
    "clocks of hosts differ": [
        "unit/client/test_group_store.py::test_the_first_rank_to_come_decides_and_confirms_only_until_all_have_joined",
    ],
    "the first rank stands still at the job's first save or load, on another machine than others": [
        "faults/test_starts.py::test_a_first_rank_that_stands_still_at_its_first_call_splits_no_job",
        "unit/client/test_group_store.py::test_a_rank_waits_for_the_one_that_claimed_the_start_however_long_that_stands_still",
    ],
    "the records of incarnations are lost": [
        "integration/test_overwrite.py::test_a_job_without_its_incarnation_records_saves_the_new_bytes",
    ],
    "the id holds another job's checkpoint": [
        "integration/test_overwrite.py::test_a_checkpoint_is_replaced_by_its_own_job_or_on_request",
        "integration/test_overwrite.py::test_a_checkpoint_of_torchs_own_is_replaced_on_request",
    ],
    "retention takes what a reader is about to read": [
        "unit/maintenance/test_retention_and_readers.py::test_a_lease_that_is_taken_after_the_first_look_spares_the_checkpoint",
        "unit/maintenance/test_retention_and_readers.py::test_the_load_of_what_retention_has_removed_says_so",
    ],
    "a signal handler raises in a client call": [
        "unit/client/test_interrupts.py::test_a_trainer_goes_on_after_any_number_of_interruptions",
    ],
    "all trainers of a host are killed, and start again there": [
        "faults/test_local_copies.py::test_trainers_that_start_again_on_their_host_read_no_data_from_the_bucket",
        "faults/test_local_copies.py::test_embedded_daemons_that_outlive_the_trainer_have_its_last_checkpoint",
    ],
    "a rank never calls load": [
        "integration/test_loads_in_step.py::a_rank_that_never_calls_load_is_named_and_the_next_load_works",
        "integration/test_loads_in_step.py::groups_and_single_ranks_load_beside_each_other",
    ],
    "a rank ends or is stopped during a load": [
        "faults/test_load_waits.py::test_a_rank_that_is_killed_or_stopped_is_named_on_all_others",
    ],
    "the job is killed between ingestion and commit, and starts again": [
        "faults/test_ingested_saves.py::test_a_start_after_all_trainers_were_killed_loses_no_ingested_step",
        "faults/test_ingested_saves.py::test_so_it_does_after_daemons_were_killed_too",
        "faults/test_ingested_saves.py::test_a_rank_that_was_not_ingested_is_named_and_the_checkpoint_before_is_loaded",
    ],
    "the sidecar is killed before a load": [
        "faults/test_local_copies.py::test_a_sidecar_that_starts_again_still_has_the_copy",
    ],
    "the sidecar is killed or stopped during a load": [
        "faults/test_local_copies.py::test_a_load_whose_sidecar_does_not_answer_reads_the_bucket",
        "faults/test_shared_loads.py::test_a_sidecar_that_is_killed_or_stopped_in_the_middle_delays_the_load",
        "unit/client/test_shared_blocks.py::test_a_sidecar_that_stalls_is_not_waited_for_until_it_answers_again",
    ],
    "all processes of a job on several hosts are started again": [
        "faults/test_restores_on_several_hosts.py::test_only_what_no_host_holds_is_read_from_the_bucket",
        "faults/test_shared_loads.py::test_what_another_hosts_spool_has_comes_from_there",
    ],
    "a host is replaced by an empty one": [
        "faults/test_restores_on_several_hosts.py::test_only_what_no_host_holds_is_read_from_the_bucket",
    ],
    "a peer or owner dies, stalls or sends wrong bytes during a load": [
        "faults/test_blocks_from_peers.py::test_a_dead_owner_costs_one_failed_request",
        "faults/test_blocks_from_peers.py::test_a_stopped_owner_delays_a_block_and_is_not_asked_again_for_a_while",
        "faults/test_blocks_from_peers.py::test_a_block_in_a_peers_spool_comes_from_there_unless_it_is_wrong",
    ],
    "storage asks for less load, or hangs, during a load": [
        "faults/test_blocks_from_peers.py::test_storage_that_asks_for_less_load_delays_a_block_and_is_asked_by_no_other_host",
        "faults/test_blocks_from_peers.py::test_a_read_of_storage_that_hangs_is_made_a_second_time",
        "unit/client/test_storage_reader.py::test_a_bucket_that_hangs_refuses_or_cuts_a_request_only_delays_the_load",
    ],
    "a spool file or replica has other bytes than were committed, before a load": [
        "faults/test_local_copies.py::test_a_copy_that_another_process_changed_is_read_from_the_bucket",
        "faults/test_local_copies.py::test_a_copy_without_receipts_in_storage_is_read_from_the_bucket",
        "faults/test_replicas.py::test_every_host_loads_the_committed_bytes_though_a_replica_received_others",
    ],
    "a trainer ends normally where its daemons end with it": [
        "faults/test_exits.py::test_the_last_save_is_committed_before_the_exit_that_ends_a_container",
        "faults/test_exits.py::test_where_daemons_survive_one_line_says_who_commits_the_last_save",
        "unit/common/test_lifetime.py::test_what_manages_a_cgroup_may_end_them",
    ],
    "a sidecar starts on a spool with ranks that belong to another endpoint": [
        "unit/sidecar/test_recovery.py::test_what_was_to_go_to_another_endpoint_is_left_to_a_sidecar_with_that_one",
        "unit/sidecar/test_recovery.py::test_nothing_else_is_kept_for_another_endpoint",
    ],
    "containers share /dev/shm": [
        "faults/test_containers.py::test_two_containers_that_share_memory_save_at_the_same_time",
        "unit/sidecar/test_default_spool.py::test_what_a_killed_sidecar_left_is_found_without_its_runtime_directory",
    ],
    "the decision can't be read or written": [
        "faults/test_failure_table.py::test_a_save_is_in_doubt_while_its_decision_can_not_be_written",
        "faults/test_slow_storage.py::test_a_commit_whose_answer_is_lost_and_can_not_be_read_is_in_doubt_and_then_true",
    ],
}
TESTS = Path(__file__).parents[1]
LARGE = 2 << 20
"""Floats of a rank whose data file is uploaded in pieces."""
UPLOADS = {"method": "POST", "path": "uploadType=resumable"}
"""What data files begin with, and nothing else does."""
PIECES = {"method": "PUT", "path": "upload_id"}


@pytest.mark.parametrize("row", ROWS)
def test_the_row_has_its_tests(row: str) -> None:
    for name in ROWS[row]:
        path, _, function = name.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture(scope="module")
def daemons(shared: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    logs = tmp_path_factory.mktemp("table")
    with Daemons(logs, sidecars=2, environment=shared.env) as running:
        yield running


@pytest.fixture
def server(shared: GcsServer) -> Iterator[GcsServer]:
    yield shared
    shared.clear()
    shared.options(ignore_checksums=False)


@pytest.fixture
def ranks(daemons: Daemons, request: pytest.FixtureRequest) -> Iterator[Party]:
    """One on each host; the second's data file is a large one."""
    addresses = [sidecar.address for sidecar in daemons.sidecars]
    incarnation = f"{abs(hash(request.node.name)):x}"
    with Party(addresses, incarnation=incarnation, words=[4, LARGE]) as party:
        yield party


def ended(daemons: Daemons, target: str) -> save_pb2.SaveStatus:
    return await_save(
        daemons.coordinator_address,
        target,
        lambda status: status.state in (COMMITTED, ABORTED),
    )


FLEETING = {
    "429": {**UPLOADS, "kind": "status", "status": 429, "times": 2},
    "500": {**PIECES, "kind": "status", "status": 500, "times": 2},
    "503": {**UPLOADS, "kind": "status", "status": 503, "times": 2},
    "reset": {**PIECES, "kind": "reset", "times": 2},
    "partial": {**PIECES, "kind": "partial", "bytes": 1 << 20},
    "slow": {"kind": "delay", "seconds": 0.1, "times": 10},
}


@pytest.mark.parametrize("trouble", FLEETING)
def test_storage_that_is_busy_resets_or_stalls_is_tried_again(
    daemons: Daemons, server: GcsServer, ranks: Party, trouble: str
) -> None:
    target = f"gs://bucket/fleeting/{trouble}"
    server.fault(**FLEETING[trouble])
    ranks.save(target, 1)
    status = ended(daemons, target)
    assert status.state == COMMITTED
    assert server.faults()[0]["hits"]
    retried = sum(rank.retries for rank in status.ranks)
    assert retried or trouble == "slow", status


@pytest.mark.parametrize("code", [401, 403, 404])
def test_storage_that_refuses_ends_the_save_at_once(
    daemons: Daemons, server: GcsServer, ranks: Party, code: int
) -> None:
    target = f"gs://bucket/refused/{code}"
    server.fault(
        **UPLOADS, kind="status", status=code, times=-1, message="the provider's own words"
    )
    with suppress(PannierError):
        # The stream may be cut on the way.
        ranks.save(target, 1, save_timeout_s=stretched(60))
    status = ended(daemons, target)
    assert status.state == ABORTED
    (failure,) = status.failures
    assert failure.rank == 1
    assert failure.host == "node-1"
    assert failure.kind == save_pb2.FAILURE_KIND_STORAGE
    assert "the provider's own words" in failure.message
    assert server.faults()[0]["hits"] == 1


@pytest.mark.parametrize("times", [1, -1])
def test_a_checksum_mismatch_is_repaired_once_and_reported_the_second_time(
    daemons: Daemons, server: GcsServer, ranks: Party, times: int
) -> None:
    target = f"gs://bucket/flipped/{times}"
    server.options(ignore_checksums=True)
    server.fault(**PIECES, kind="corrupt", times=times)
    # What is streamed is uploaded at once: the second failure may come before all is handed over.
    with nullcontext() if times == 1 else suppress(SaveAbortedError):
        ranks.save(target, 1)
    status = ended(daemons, target)
    if times == 1:
        assert status.state == COMMITTED
        assert sum(rank.retries for rank in status.ranks) == 1
        return
    assert status.state == ABORTED
    (failure,) = status.failures
    assert (failure.rank, failure.kind) == (1, save_pb2.FAILURE_KIND_INTEGRITY)
    assert len(set(re.findall(r"\b[0-9a-f]{8}\b", failure.message))) == 2, failure


def test_ranks_that_disagree_are_named_with_their_values(daemons: Daemons, ranks: Party) -> None:
    ids = [f"gs://bucket/disagree/step-{rank}" for rank in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(hand.agree, hand.context(id))
            for hand, id in zip(ranks.hands, ids, strict=True)
        ]
    for call in calls:
        error = call.exception()
        assert isinstance(error, SaveAbortedError)
        assert all(id in str(error) for id in ids), error
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)


def test_a_rank_that_never_calls_save_is_named_at_the_deadline(
    daemons: Daemons, ranks: Party
) -> None:
    target = "gs://bucket/never/step-1"
    # So that it is known where it is.
    ranks.save("gs://bucket/never/step-0", 1)
    caller = ranks.hands[0]
    began = time.monotonic()
    with pytest.raises(SaveAbortedError, match=r"rank 1\b.*node-1"):
        caller.agree(caller.context(target, 2), timeout_s=2)
    assert time.monotonic() - began >= 2


def test_a_save_is_in_doubt_while_its_decision_can_not_be_written(
    daemons: Daemons, server: GcsServer, ranks: Party
) -> None:
    target = "gs://bucket/doubt/step-1"
    plans = ranks.agree(target, 1)
    first, *others = ranks.hands
    for hand in others:
        hand.ingest(hand.context(target), plans[hand.rank])
    durable = save_pb2.RANK_PHASE_DURABLE
    await_save(
        daemons.coordinator_address,
        target,
        lambda s: all(part.phase == durable for part in s.ranks if part.rank != first.rank),
    )
    # All that is still written.
    server.fault(kind="status", method="POST", path="uploadType=multipart", status=403, times=-1)
    first.fail(first.context(target), "boom")
    doubt = save_pb2.SAVE_STATE_IN_DOUBT
    await_save(daemons.coordinator_address, target, lambda s: s.state == doubt)
    server.clear()
    status = ended(daemons, target)
    assert status.state == ABORTED
    assert [failure.message for failure in status.failures] == ["boom"]
