"""``client.latest``: the newest checkpoint below a root, one answer for all ranks.

In: a root. Out: a checkpoint id that the group's first rank has found, after it has waited, if asked to, for
saves that an earlier start left ingested. The others get its answer through the group's store. No
collective. Blocking.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client import console, torch_compat
from pannier.client.config import check_timeout
from pannier.client.loading import catalog, highest_incarnation
from pannier.client.loading.filesystem import open_dir
from pannier.client.process_group import is_alone
from pannier.client.ranks.group_store import GroupStore, join_start
from pannier.client.ranks.rank_hosts import default_hosts
from pannier.client.ranks.rank_problem import Problem
from pannier.client.resume.ingested_saves import IngestedSaves
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.common.locations import CHILDREN, Pattern, absolute
from pannier.wire.errors import DeadlineError, InvalidRequestError, StorageError

Include: TypeAlias = Literal["committed", "ingested"]

_KIND: Final = "latest"
"""Of calls that ranks count."""


def find_latest(
    root: str | os.PathLike[str],
    *,
    pattern: str = CHILDREN.text,
    process_group: Any = None,
    no_dist: bool = False,
    include: Include = "committed",
    timeout: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    before: Callable[[], None] = lambda: None,
    ingested: IngestedSaves | None = None,
) -> str | None:
    """See :meth:`pannier.client.reading.Reader.latest`.

    Args:
        ingested: finishes saves that aren't committed yet.
        before: called first; what it raises on the first rank is raised on all ranks.
    """
    wanted = ingested if include == "ingested" else None

    def check() -> float | None:
        if include not in get_args(Include):
            raise InvalidRequestError(f"include={include!r}: give 'committed' or 'ingested'")
        absolute(root)
        Pattern(pattern)
        return None if timeout is None else check_timeout(timeout)

    try:
        given_s, place = check(), absolute(root)
    except (InvalidRequestError, TypeError):
        # Raised below, once the call is counted: so the next one is in step.
        given_s, place = None, str(root)
    text = place if pattern == CHILDREN.text else f"{place}/{pattern}"
    look_s = given_s or timeouts.INGESTED_S

    def prepare() -> None:
        check()
        before()
        if wanted is not None:
            wanted.resume_here()

    def look() -> str | None:
        # The start of daemons takes of it.
        deadline = Deadline(look_s)
        prepare()
        # Before the listing: so that an incarnation that starts to save after it has a higher number.
        highest_incarnation.read(root, storage_options)
        below = Pattern(pattern)
        if wanted is not None:
            wanted.finish_newest(root, below, storage_options, deadline.remaining())
        with catalog.logged_list(root):
            found = catalog.newest(open_dir(root, storage_options), below)
        return found.checkpoint_id if found is not None else None

    if is_alone(no_dist):
        return look()
    # The others wait for longer than the first rank does.
    answer_s = given_s or timeouts.LATEST_S if wanted is None else look_s + timeouts.LATEST_S
    return _shared(place, text, look, process_group, answer_s, prepare)


def _shared(
    root: str,
    what: str,
    look: Callable[[], str | None],
    process_group: Any,
    timeout: float,
    prepare: Callable[[], None],
) -> str | None:
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} is not in this process group: only its ranks may call latest() "
            "with it"
        )
    rank = dist.get_rank(process_group)
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    hosts = default_hosts()
    description = f"latest below {what}"
    start = join_start(hosts, description=description, timeout_s=timeout)
    part = PrefixStore(_KIND, start.prefix(torch_compat.group_store(process_group)))
    store = GroupStore(part, hosts, description=description, timeout_s=timeout)
    key = str(start.next_number(torch_compat.group_name(process_group), _KIND))
    store.run(lambda _: hosts.register())
    if rank == 0:
        return _look_for_all(root, what, look, lambda answer: store.put(key, answer))
    # After the call was counted: so the next call is in step also if this one raises.
    prepare()
    first_text = store.run(lambda _: hosts.text([first]))
    with console.logged(description, lambda: f"{first_text} to list what is in storage"):
        answer = store.await_value(key, timeout)
    if answer is None:
        raise DeadlineError(
            f"waiting for {first_text}: after {timeout:g} s it has not reported the newest checkpoint "
            f"below {what}; does it call latest() as often as rank {dist.get_rank()}?"
        )
    if answer["what"] != what:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} called latest() for {what}, but the first rank of its group for "
            f"{answer['what']}"
        )
    if "error" in answer:
        raise StorageError(answer["error"])
    highest_incarnation.remember(root, answer["incarnation"])
    latest_id: str | None = answer["latest"]
    return latest_id


def _look_for_all(
    root: str, what: str, look: Callable[[], str | None], send: Callable[[Any], None]
) -> str | None:
    """Runs ``look``, and sends its result or its error to the other ranks."""
    try:
        found = look()
    except Exception as error:
        send({"what": what, "error": Problem.of(error).to_json()["message"]})
        raise
    incarnation = highest_incarnation.known(root)
    send({"what": what, "latest": found, "incarnation": incarnation})
    return found
