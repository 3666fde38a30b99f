"""The ``Diagnosis`` service of a coordinator: its state, and whether it reaches storage. Event loop only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pannier.coordinator.config import CoordinatorConfig
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.daemon import doctor_checks
from pannier.maintenance.restore_check import Holder, check_restore
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc


class CoordinatorDiagnosis(diagnosis_pb2_grpc.DiagnosisServicer):
    """See the proto.

    Args:
        draining: whether new saves are refused.
        attached: sidecars with an open stream.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        draining: Callable[[], bool],
        attached: Callable[[], Sequence[SidecarPeer]],
    ) -> None:
        self._config = config
        self._draining = draining
        self._attached = attached

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        return await doctor_checks.diagnose(
            request,
            daemon="coordinator",
            host=self._config.host,
            own_checks=self._looks,
            allow=self._config.allow,
            storage_options=self._config.storage_options,
            restore=self._check_restore,
        )

    def _looks(self) -> Iterator[diagnosis_pb2.Check]:
        yield doctor_checks.check_state(draining=self._draining())

    async def _check_restore(self, root: str, timeout_s: float) -> diagnosis_pb2.Check:
        return await check_restore(
            root, self._config.storage_options, timeout_s, self._holders, allow=self._config.allow
        )

    def _holders(self, attempt: str) -> list[Holder]:
        """Holders of the attempt's files, by host; one without ``--peers`` serves only its own ranks."""
        found: dict[str, Holder] = {}
        for peer in self._attached():
            problem = (
                "" if peer.copies.peer_address else "which has no --peers: for its ranks alone"
            )
            for copy in peer.copies.copies:
                if copy.attempt == attempt:
                    found[peer.host] = Holder(
                        peer.host, copy.files, copy.bytes, problem, bool(peer.failure_domain)
                    )
        return [found[host] for host in sorted(found)]
