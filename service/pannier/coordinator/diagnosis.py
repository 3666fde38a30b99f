"""The ``Diagnosis`` service of a coordinator: its state, and whether it reaches storage. Event loop only."""

from collections.abc import Callable, Iterator
from typing import Any

from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon import doctor_checks
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc


class CoordinatorDiagnosis(diagnosis_pb2_grpc.DiagnosisServicer):
    """See the proto.

    Args:
        draining: whether new saves are refused.
    """

    def __init__(self, config: CoordinatorConfig, draining: Callable[[], bool]) -> None:
        self._config = config
        self._draining = draining

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
        )

    def _looks(self) -> Iterator[diagnosis_pb2.Check]:
        yield doctor_checks.check_state(draining=self._draining())
