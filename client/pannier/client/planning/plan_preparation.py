"""Plans and reserves before training starts, so that the first save costs what every save costs.

In: a state like those to come, and where they go. Out: a plan that is kept, and memory that is
there, with everything in it but the values. Nothing is saved.
"""

from pannier.client.planning.agreed_plan import Wish, keep
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.plan_cache import PlanCache, options_of
from pannier.client.staging import device_copy
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.v1 import sidecar_pb2


def prepare(
    wish: Wish,
    *,
    keeper: PlanCache,
    session: SidecarClient,
    context: sidecar_pb2.SaveContext,
    pool: ArenaPool,
    arenas: int,
    timeout_s: float,
) -> None:
    """Waits until all ranks have handed their plans in, then reserves memory.

    Args:
        wish: what is to be saved later; its number is this call's own.
        keeper: keeps the plan.
        session: whom to ask.
        context: as of a save with the wish's number.
        pool: keeps the memory.
        arenas: how many saves may be in flight.
        timeout_s: for the other ranks' plans, seconds.

    Raises:
        InvalidRequestError: see :class:`PlannerRun`.
        SaveAbortedError: another rank can't take part; with failures by rank.
        PannierError: there is no memory, or nobody answers.
    """
    planning = PlannerRun(
        wish.state,
        wish.planner,
        is_coordinator=wish.is_coordinator,
        checkpoint_id=wish.checkpoint_id,
    )
    request = sidecar_pb2.PlanRequest(
        context=context,
        plan=planning.message,
        digest=planning.digest,
        timeout_s=timeout_s,
        save_timeout_s=timeout_s,
        prepare=True,
    )
    final = session.plan(request, timeout_s).plan
    planning.finish(final)
    options = options_of(wish.planner)
    plan = keep(keeper, wish, planning, final, options)
    match = plan.match(options, wish.state) if plan is not None and options is not None else None
    held: list[Arena] = []
    try:
        for _ in range(arenas):
            arena = session.arena(pool, [file.size for file in final.files])
            held.append(arena)
            if match is not None:
                match.route.engrave(arena)
            device_copy.make_ready(arena, wish.state)
    finally:
        for arena in held:
            pool.release(arena)
