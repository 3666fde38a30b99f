"""Every duration that Pannier waits, in one table: seconds.

The settings of users are elsewhere (:mod:`pannier.client.config`, the options of the daemons); so are
limits of what a message may ask for (:mod:`pannier.wire.limits`).

``PANNIER_TIME_SCALE`` multiplies all of them: tests on a slow machine set it.
"""

import os
from typing import Final

SCALE: Final = float(os.environ.get("PANNIER_TIME_SCALE") or "1")
if not 0 < SCALE < float("inf"):
    raise ValueError(f"PANNIER_TIME_SCALE={SCALE:g} is not a positive number")


# How liveness is observed, by all processes

HEARTBEAT_S: Final = 1.0 * SCALE
"""Between two heartbeats of a sidecar to its coordinator."""
PING_S: Final = 2.0 * SCALE
"""Between two pings of a trainer to its sidecar."""
PING_TIMEOUT_S: Final = 2.0 * SCALE
"""For the answer to a ping."""
PING_AGAIN_S: Final = 0.5 * SCALE
"""Pause after a ping that was not answered."""
UNRESPONSIVE_S: Final = 5.0 * SCALE
"""A process that was not seen for so long is unresponsive, and named; a save fails because of it only
at the save's deadline."""
CHECK_S: Final = 1.0 * SCALE
"""Between two checks for what has no event of its own: missed heartbeats, idle daemons."""
OBSERVER_SLACK_S: Final = 0.5 * SCALE
"""How late a tick may be and still count as on time."""
TRANSPORT_PING_S: Final = 1.0 * SCALE
"""Between two pings of HTTP/2 on an idle connection to the coordinator."""
TRANSPORT_PING_TIMEOUT_S: Final = 3.0 * SCALE
"""Without an answer to such a ping for so long, the connection is closed."""

# How long a process that disconnected has to return, until it counts as dead

LOAD_RETURN_S: Final = 5.0 * SCALE
"""For a rank whose stream of reports about its load broke to report again."""
TRAINER_RETURN_S: Final = 1.5 * SCALE
"""For a trainer whose stream broke to connect again."""
REMOTE_TRAINER_RETURN_S: Final = 10.0 * SCALE
"""The same on TCP, where an interrupted network looks the same."""
TRAINER_CONNECT_S: Final = 5.0 * SCALE
"""For the client of a rank that hands something in to connect."""
RECOVERED_TRAINER_CONNECT_S: Final = 10.0 * SCALE
"""The same for a rank that was recovered from the journal."""
CALL_RETURN_S: Final = 1.0 * SCALE
"""For a sidecar to repeat a Plan call that broke off."""
SIDECAR_RETURN_S: Final = 3.0 * SCALE
"""For a sidecar whose stream broke to attach again."""
TAKE_OVER_S: Final = 10.0 * SCALE
"""For the sidecar of a rank that was replicated to attach again, before the holder uploads the rank."""
NO_HOLDER_S: Final = 10.0 * SCALE
"""For a host of another failure domain to attach, before a sidecar is notified that there is none."""
SUPERSEDED_RETURN_S: Final = 10.0 * SCALE
"""For a sidecar that was restarted beside a newer incarnation to attach."""
SPLIT_S: Final = 2.0 * SCALE
"""Until a group whose ranks take part in two incarnations counts as split."""
STREAMS_BATCH_S: Final = 0.02 * SCALE
"""Hosts whose sidecars come or go within this time are checked together."""
REPORT_COUNTS_S: Final = 5.0 * SCALE
"""A report about a trainer counts this long; sidecars send one every second or so."""

# How long ended or disconnected things are remembered

DEAD_TRAINER_KEPT_S: Final = 600.0 * SCALE
"""A dead trainer, in reports to the coordinator: other ranks may wait for it."""
SIDECAR_KEPT_S: Final = 3600.0 * SCALE
"""A disconnected sidecar."""
ENDED_SAVE_KEPT_S: Final = 3600.0 * SCALE
"""A save that ended, at the coordinator."""
LOAD_LOST_S: Final = 30.0 * SCALE
"""A rank of a load, at the coordinator: one that no sidecar reports for so long counts as lost."""
ENDED_LOAD_KEPT_S: Final = 3600.0 * SCALE
"""A load that ended, at each daemon."""
SPOOL_FILE_KEPT_S: Final = 60.0 * SCALE
"""Unused files of a job without trainers, in case it starts again."""
LOCAL_COPY_KEPT_S: Final = 3600.0 * SCALE
"""Files of a committed save of a job without trainers, for its next start on this host."""
DAEMON_LOG_KEPT_S: Final = 86400.0 * SCALE
"""The log of embedded daemons that have exited."""

# The trainer's calls

CONNECT_S: Final = 3.0 * SCALE
"""For a sidecar to answer before it counts as unreachable."""
EMBEDDED_CONNECT_S: Final = 15.0 * SCALE
"""The same for embedded daemons, which may just be starting on a busy machine."""
CONNECT_AGAIN_S: Final = 0.05 * SCALE
"""First pause before a trainer connects to its sidecar again; then it doubles."""
CONNECT_LONGEST_AGAIN_S: Final = 1.0 * SCALE
"""Longest such pause."""
DISCONNECT_S: Final = 1.0 * SCALE
"""For the calls that announce the end of the connection or of staging memory."""
RECONNECT_S: Final = 10.0 * SCALE
"""How long a call of the trainer's own thread waits for a disconnected sidecar."""
EMBEDDED_RESTART_S: Final = 40.0 * SCALE
"""The same for embedded daemons, which are started again."""
CALL_S: Final = 30.0 * SCALE
"""One try of a call for which the sidecar waits for no other process."""
CALL_AGAIN_S: Final = 0.1 * SCALE
"""First pause before a call is repeated because the sidecar can't be reached; then it doubles."""
CALL_LONGEST_AGAIN_S: Final = 1.0 * SCALE
"""Longest such pause."""
ANSWER_SLACK_S: Final = 5.0 * SCALE
"""Left to the daemon to report its own time-out, with the ranks that it waited for."""
COORDINATOR_SLACK_S: Final = 2.5 * SCALE
"""The same, left to the coordinator by a sidecar."""
BEGIN_S: Final = 60.0 * SCALE
"""For storage to answer when a save that torch plans is opened."""
TRAINER_FAIL_S: Final = 5.0 * SCALE
"""For the sidecar to take the report that a rank skips or fails a save."""
HAND_OVER_S: Final = 300.0 * SCALE
"""For the sidecar to take a rank's hand-over, unless the save has a deadline."""
SEND_S: Final = 3600.0 * SCALE
"""For the sidecar to take a data file, unless the save has a deadline."""
FAIL_S: Final = 2.0 * SCALE
"""For the coordinator to take a failure by a call; otherwise it goes with the reports."""
WAIT_WARNING_S: Final = 2.0 * SCALE
"""Until a call that keeps the training loop waiting first logs what it waits for, on rank 0."""
WAIT_WARNING_OTHERS_S: Final = 8.0 * SCALE
"""The same on other ranks, which mostly wait for the same as rank 0."""
IN_FLIGHT_RECOUNT_S: Final = 1.0 * SCALE
"""Between two counts of the saves in flight: a save that is lost notifies no waiter."""
COPY_POLL_S: Final = 0.01 * SCALE
"""Between two checks whether helper threads still copy, besides when one has ended."""
FREED_CHECK_S: Final = 1.0 * SCALE
"""Between two checks whether a call was interrupted twice and has lost what it held."""

# A save in the trainer's background

ABORT_S: Final = 30.0 * SCALE
"""For the coordinator's ABORT before the handle fails with InDoubtError, once this rank has
failed and may have been ingested."""
CAUSES_S: Final = 2.0 * SCALE
"""For the causes of all ranks before the handle fails with the local error, of a save that can't
be committed."""
DECISION_S: Final = 5.0 * SCALE
"""For the coordinator's decision after the save's deadline."""
BUSY_AGAIN_S: Final = 0.5 * SCALE
"""Between two tries of a hand-over for which the spool has no room."""
EXIT_S: Final = 60.0 * SCALE
"""How long an ending interpreter waits for a full spool without any progress."""
STREAM_STALL_S: Final = 30.0 * SCALE
"""Without an acknowledgement for so long, a Write stream is started again."""
DESCRIPTORS_S: Final = 10.0 * SCALE
"""For the sidecar to send the descriptors of leased files."""
LOCATE_S: Final = 5.0 * SCALE
"""For a sidecar to answer a load which files it has; afterwards the load reads from storage."""

LOAD_REPORT_BEGIN_S: Final = 0.5 * SCALE
"""Until a load is first reported; a shorter load reports only its end."""
LOAD_REPORT_S: Final = 1.0 * SCALE
"""Between two reports of a running load."""
LOAD_REPORT_AGAIN_S: Final = 0.2 * SCALE
"""First pause after a stream of reports broke; then it doubles, up to LOAD_REPORT_S."""
LOAD_REPORT_END_S: Final = 0.25 * SCALE
"""How long a load that has ended waits for the sidecar to take its last report."""
LOAD_REPORT_LAST_S: Final = 10.0 * SCALE
"""How long after the load's end its last report is tried in the background."""
FETCH_POLL_S: Final = 0.25 * SCALE
"""Between two looks whether a block that a load waits for is still on its way."""
FETCH_STALL_S: Final = 3.0 * SCALE
"""After so long without a sign of life from a sidecar that fetches blocks, they are also read from storage."""
FETCH_SLOW_S: Final = 30.0 * SCALE
"""After so long a block is also read from storage though its sidecar shows signs of life."""
FETCH_LAST_S: Final = 60.0 * SCALE
"""How long such a block is still awaited when storage can't be read either."""
STORED_STALL_S: Final = 2.0 * SCALE
"""Shortest time after which a rank's read of storage is made a second time."""
STORED_FIRST_STALL_S: Final = 10.0 * SCALE
"""The same while the usual time of reads of like sizes isn't known yet."""
FETCH_CLOSE_S: Final = 2.0 * SCALE
"""For the stream of fetched blocks to end with its load."""
LOAD_S: Final = 600.0 * SCALE
"""How long a load waits for a rank that shows no progress, unless the caller gives a time."""
DIRECTORY_CACHED_S: Final = 75.0 * SCALE
"""For files of other hosts to show in a shared directory: by default a client of NFS remembers for up to 60 s
that a file was missing (``acdirmax`` in nfs(5))."""
LOAD_REJOIN_S: Final = 5.0 * SCALE
"""How long a rank that comes to a load which the others gave up waits for them to load again."""
WAIT_LOOK_S: Final = 1.0 * SCALE
"""First pause between two looks which ranks of a load are missing."""
WAIT_LONGEST_LOOK_S: Final = 10.0 * SCALE
"""Longest such pause."""
WAIT_LONGEST_POLL_S: Final = 0.05 * SCALE
"""Longest pause between two looks into the process group's store, of a rank that waits for others."""
READ_PROGRESS_S: Final = 2.0 * SCALE
"""Between two reports of a rank that reads to those that wait for it."""

LATEST_S: Final = 60.0 * SCALE
"""For the first rank's answer which checkpoint is the newest; unless the caller gives a time."""
INGESTED_S: Final = 600.0 * SCALE
"""For saves that an earlier start left ingested to be committed; unless the caller gives a time."""
INGESTED_POLL_S: Final = 0.5 * SCALE
"""Between two looks whether these saves are committed."""
INGESTED_SIGN_S: Final = 20.0 * SCALE
"""An ingested save that no sidecar of the host knows, and of which nothing new came to storage for so long, is
given up: its daemons may just be starting."""
INGESTED_COMMIT_S: Final = 5.0 * SCALE
"""For a coordinator to commit a save whose receipts are all in storage."""
INGESTED_RECOVER_S: Final = 1.0 * SCALE
"""Least time for ``pannier recover`` to commit such a save, also at the end of the wait."""

# The sidecar's ingest and spool

WRITE_TURN_S: Final = 4.0 * SCALE
"""A stream that has waited for its turn for so long is read without one: trainers that don't send must not block
others."""
WRITE_IDLE_S: Final = 30.0 * SCALE
"""A Write stream that sends nothing for so long is ended: it may hold space in the spool. A
client that was stopped meanwhile goes on with another stream."""
WRITE_HEADER_S: Final = 10.0 * SCALE
"""The same for one that hasn't sent its header."""
DESCRIPTORS_FETCH_S: Final = 30.0 * SCALE
"""A lease, or an offer of files to a load, ends when its descriptors weren't fetched within this time."""
DESCRIPTORS_SEND_S: Final = 2.0 * SCALE
"""For a client to take the descriptors that it asked for."""
ACCEPT_AGAIN_S: Final = 0.1 * SCALE
"""Pause after a connection that could not be accepted."""
FILE_RELEASE_S: Final = 10.0 * SCALE
"""How long a file may stay in use after its save has ended: uploads are cancelled meanwhile."""
LEAVE_S: Final = 1.0 * SCALE
"""For the last reports to reach the coordinator when a sidecar stops."""
CONFIRM_S: Final = 0.1 * SCALE
"""How long uploads of a rank wait for its claim to be confirmed: a rank of another host may be late."""
UPLOADS_CLOSE_S: Final = 2.0 * SCALE
"""How long closing waits until objects of aborted saves are deleted: storage may not answer."""
PROGRESS_S: Final = 0.2 * SCALE
"""Between two messages that report progress alone: to a client, and to the coordinator."""

# The coordinator's saves

SKIP_STORAGE_S: Final = 2.0 * SCALE
"""How long storage may delay the plan of a save with ``on_busy="skip"``, once all ranks have called."""
STORAGE_WAIT_CHECK_S: Final = 0.2 * SCALE
"""Between two looks whether the plan of a save that storage may not delay waits for storage."""
DEFAULT_SAVE_S: Final = 3600.0 * SCALE
"""For a save of which no rank has reported a deadline."""
RESUMED_SAVE_S: Final = 60.0 * SCALE
"""Least time of a resumed save once storage has shown what it holds of it: for sidecars to report
again and to finish uploads."""
RESUME_CHECK_S: Final = 3.0 * SCALE
"""Until storage is first checked for ranks without a live sidecar; then the pause doubles."""
RESUME_LONGEST_CHECK_S: Final = 30.0 * SCALE
"""Longest pause, also when all ranks have live sidecars: another coordinator may have decided."""
SIDECARS_CACHED_S: Final = 0.1 * SCALE
"""How long it is remembered whether all ranks have live sidecars: it is asked after each
change."""
RECEIPTS_S: Final = 10.0 * SCALE
"""For storage to list receipts, or to show decisions."""
RECEIPT_S: Final = 0.05 * SCALE
"""Added to RECEIPTS_S for each receipt that may have to be read."""
STEP_AGAIN_S: Final = 0.2 * SCALE
"""First pause between tries of a step that storage must answer."""
STEP_LONGEST_AGAIN_S: Final = 5.0 * SCALE
"""Longest such pause."""
MANIFEST_SHOWN_S: Final = 10.0 * SCALE
"""For storage to show whether it holds a manifest of a save that is about to be aborted."""
REMOVE_AGAIN_S: Final = (3.0 * SCALE, 30.0 * SCALE)
"""Pauses after an abort before its objects are removed once more."""
SWEEP_AGAIN_S: Final = 60.0 * SCALE
"""Pause after a sweep of superseded attempts that failed."""
TASK_CANCEL_S: Final = 0.5 * SCALE
"""Between two cancellations of a task that has not ended."""
DECIDING_S: Final = 2.0 * SCALE
"""How long a coordinator waits after SIGTERM for decisions that are being written."""
FIRST_TRAINER_S: Final = 60.0 * SCALE
"""Shortest idle time before the first trainer: its host may only be starting its sidecar."""
STATUS_REFRESH_S: Final = 1.0 * SCALE
"""Between two statuses of a save that has not changed, but for what changes with time ("last seen
12 s ago")."""
STATUS_DUE_S: Final = 0.9 * SCALE
"""Age at which a status is due: the timer of STATUS_REFRESH_S is no more exact than that."""
CREDENTIALS_AGAIN_S: Final = 0.5 * SCALE
"""Before a trainer looks again for credentials that a late metadata server has not given yet."""
STORAGE_CONTACT_S: Final = 20.0 * SCALE
"""For a root to answer at its first use: the training loop waits for it."""

# Storage

STORAGE_CONNECT_S: Final = 15.0 * SCALE
"""For a connection to storage."""
STORAGE_IDLE_S: Final = 60.0 * SCALE
"""A request to storage that moves no byte for so long is tried again."""
STORAGE_KEPT_S: Final = 15.0 * SCALE
"""A connection that has had nothing to upload for so long isn't used again: its peer may be about to close it."""
RETRY_S: Final = 0.25 * SCALE
"""First pause before a request to storage is tried again; then it doubles."""
LONGEST_RETRY_S: Final = 20.0 * SCALE
"""Longest such pause."""
LONGEST_RETRY_AFTER_S: Final = 60.0 * SCALE
"""Longest Retry-After that is honoured."""
CONFLICT_AGAIN_S: Final = 2.0 * SCALE
"""Longest pause between two tries of a write for which several writers compete."""
UPLOAD_CLEAN_UP_S: Final = 5.0 * SCALE
"""For the removal of what a failed upload left."""
LOCK_AGAIN_S: Final = 0.005 * SCALE
"""Between two tries to lock a file of a local store."""
WALK_S: Final = 3600.0 * SCALE
"""Least time-out of calls of a local store that take longer in larger directories."""
IO_THREAD_IDLE_S: Final = 10.0 * SCALE
"""A thread for blocking calls that has had nothing to do for so long ends."""
HUNG_CALL_S: Final = 5.0 * SCALE
"""A blocking call whose caller was cancelled is abandoned after this time."""

# Blocks that a sidecar fetches for loads

BLOCK_ALIVE_S: Final = 0.5 * SCALE
"""Between two signs of life while a block is awaited: to a rank, and to a peer."""
BLOCK_STALL_S: Final = 1.0 * SCALE
"""Shortest time after which a block is also requested from the next source, and for which a peer may send
nothing."""
BLOCK_FIRST_STALL_S: Final = 4.0 * SCALE
"""The same for storage, while the usual time of its blocks isn't known yet, and for a peer that has yet
to be connected to."""
BLOCK_SLOW_S: Final = 15.0 * SCALE
"""Shortest such time for a peer that shows that it is alive."""
BLOCK_S: Final = 120.0 * SCALE
"""For one source to send a block, retries included."""
BLOCK_ROOM_S: Final = 1.0 * SCALE
"""How long a block is kept after its last use for readers that are still to come, while others need its room."""
BLOCK_FULL_S: Final = 30.0 * SCALE
"""For a rank to release a block when all of the memory is mapped; afterwards requests for more fail."""
BLOCKS_KEPT_S: Final = 10.0 * SCALE
"""How long blocks are kept for other hosts after the last rank of this host has finished its load."""
BLOCK_SEND_S: Final = 30.0 * SCALE
"""For a peer to receive a block."""
STORE_KEPT_S: Final = 60.0 * SCALE
"""How long a connection to storage, or to a peer, is kept after the last load that used it."""
PEER_AVOIDED_S: Final = 10.0 * SCALE
"""A peer that failed or stalled isn't asked for so long."""
LOAD_KNOWN_S: Final = 900.0 * SCALE
"""Peers may read blocks of a load for so long after a rank here has announced it."""

# Replicas in the spool of another host

REPLICA_ACK_S: Final = 0.5 * SCALE
"""Between two reports of a host how much of a replica it has."""
REPLICA_STALL_S: Final = 30.0 * SCALE
"""For a host to take bytes of a replica, or to confirm the last ones; then it is sent again."""
REPLICA_AGAIN_S: Final = 0.5 * SCALE
"""First pause before a replica is sent again; then it doubles."""
REPLICA_LONGEST_AGAIN_S: Final = 10.0 * SCALE
"""Longest such pause."""
REPLICA_STALE_S: Final = 60.0 * SCALE
"""A replica of which nothing arrived for so long is given up, unless it is complete."""
REPLICA_OUTCOME_S: Final = 30.0 * SCALE
"""Without the coordinator's status of a replica's save for so long, storage is asked how it ended."""
REPLICA_KEPT_S: Final = 3600.0 * SCALE
"""A complete replica stays for so long after its save's deadline if no outcome is known: the job's next
coordinator may have it uploaded."""

# Leases of readers

LEASE_RENEW_S: Final = 30.0 * SCALE
"""Between renewals; without any, the lease expires after three times as long."""
LEASE_IDLE_S: Final = 600.0 * SCALE
"""Without a call of Lease.touch for so long, a lease ends."""
LEASE_RELEASE_S: Final = 10.0 * SCALE
"""For a released lease to be removed; otherwise it expires."""
LEASE_UNKNOWN_RENEW_S: Final = 60.0 * SCALE
"""Renewal period of an unreadable lease: it may be half written."""
LEASE_LONGEST_RENEW_S: Final = 3600.0 * SCALE
"""Longest renewal period that counts: no lease protects files for ever."""
LEASE_LOOK_S: Final = 30.0 * SCALE
"""Longest time until a sweep reads leases again."""

# Starting and stopping daemons

DAEMONS_START_S: Final = 30.0 * SCALE
"""For embedded daemons to start."""
DAEMONS_STOP_S: Final = 60.0 * SCALE
"""How long ``pannier down`` waits for the daemons' exit."""
DAEMONS_START_POLL_S: Final = 0.02 * SCALE
"""Between two looks whether embedded daemons have started."""
DAEMON_ACCEPT_S: Final = 1.0 * SCALE
"""For the socket of an embedded daemon to accept a connection; otherwise the daemon counts as not running."""
DAEMONS_STATUS_POLL_S: Final = 0.2 * SCALE
"""Between two looks at what embedded daemons still do, where they may end with the trainer."""
LOGIND_S: Final = 2.0 * SCALE
"""For systemd-logind to answer whether it kills processes at logout."""
STATUS_CALL_S: Final = 10.0 * SCALE
"""For the status call of a daemon."""
HOST_DAEMONS_IDLE_S: Final = 300.0 * SCALE
"""The embedded daemons of a host exit after an idle time of this length."""
JOB_DAEMONS_IDLE_S: Final = 60.0 * SCALE
"""The same for the daemons of one start of a job on several hosts."""
LEADER_S: Final = 10.0 * SCALE
"""For rank 0 to become the leader, and for a rank on another host to report itself."""
COORDINATOR_START_S: Final = 60.0 * SCALE
"""For a coordinator to listen after its sidecar, and then to answer: with --planner it imports torch."""
COORDINATOR_REACH_S: Final = 5.0 * SCALE
"""For a connection to a coordinator's port: after that, packets are dropped on the way."""
STORE_POLL_S: Final = 0.02 * SCALE
"""First pause between two looks whether a rank has asked to confirm the job's start."""
STORE_LONGEST_POLL_S: Final = 0.5 * SCALE
"""Longest such pause."""
RANK_ANSWER_EXIT_S: Final = 2.0 * SCALE
"""At exit: for a confirmation that is being written."""
RUNTIME_DIR_CHECK_S: Final = 1.0 * SCALE
"""Between two looks whether the files of a runtime directory are still there."""
RUNTIME_DIR_LOCK_S: Final = 0.5 * SCALE
"""Between two looks whether a supervisor that holds the lock is stopping."""
RUNTIME_DIR_RESTORED_S: Final = 15.0 * SCALE
"""For daemons to serve again whose runtime directory has lost its files."""
RUNTIME_DIR_TOUCH_S: Final = 3600.0
"""Between two times that files of a runtime directory are touched; cleaners go by days."""
DAEMON_AGAIN_S: Final = 0.2 * SCALE
"""First pause before a daemon that exited is started again; then it doubles."""
DAEMON_LONGEST_AGAIN_S: Final = 10.0 * SCALE
"""Longest such pause."""
DAEMON_STEADY_S: Final = 30.0 * SCALE
"""After running this long, a daemon's pause and count of crashes begin again."""
ATTACH_LONGEST_AGAIN_S: Final = 2.0 * SCALE
"""Longest pause before a sidecar connects to its coordinator again."""
TRACES_EXPORT_S: Final = 2.0 * SCALE
"""For the last export of traces when the process ends: the collector may be unreachable."""

# Several jobs on a node

JOB_CALL_S: Final = 3.0 * SCALE
"""For a job's sidecar to answer; the others' answers wait for it."""
JOB_KILL_S: Final = 5.0 * SCALE
"""A sidecar's time to exit on top of its grace period, before SIGKILL."""
JOB_RESTART_S: Final = 10.0 * SCALE
"""A sidecar's time to exit when it is to be started again with other settings."""
JOB_START_S: Final = 600.0 * SCALE
"""How long a job's sidecar that recovers its spool may delay the node's readiness."""
SUPERVISOR_REPORT_S: Final = 20.0 * SCALE
"""The supervisor reports every second: without a report for so long it is stuck."""
REFUSALS_LOG_S: Final = 10.0 * SCALE
"""Between two log lines about calls that are refused."""

# What operators ask

WATCH_RECONNECT_S: Final = 10.0 * SCALE
"""How long a daemon may be unreachable while a save is watched, for a restart."""
WATCH_STREAM_S: Final = 30.0 * SCALE
"""After so long a watch opens its stream again: a daemon that is stopped or cut off would never end it."""
STATUS_INTERVAL_S: Final = 0.1 * SCALE
"""Shortest time between two messages of WatchSave."""
STATUS_CACHED_S: Final = 0.5 * SCALE
"""How long a status page's status is cached; at least ten times as long as rendering it took."""
LOOP_S: Final = 10.0 * SCALE
"""For an event loop to run a callback of another thread."""
HTTP_S: Final = 10.0 * SCALE
"""For the next line of a request, or for the client to read the response."""
HTTP_STOP_S: Final = 0.25 * SCALE
"""How long stopping the HTTP server may take."""
DOCTOR_S: Final = 20.0 * SCALE
"""For a check of doctor, unless it is given."""
DOCTOR_LONGEST_S: Final = 120.0 * SCALE
"""Longest that may be given."""
DOCTOR_SIDECAR_S: Final = 10.0 * SCALE
"""For the coordinator's answer to a sidecar, on top of the time that storage may take."""
DOCTOR_GATEWAY_S: Final = 15.0 * SCALE
"""The same for the answers of the jobs' sidecars to the gateway."""
DOCTOR_ALL_S: Final = 30.0 * SCALE
"""The same for a daemon's answer to the command."""
