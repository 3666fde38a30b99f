"""``Diagnosis`` of a sidecar: its own checks, those of storage, and the coordinator's diagnosis.

Handlers run in the server's threads; they await the checks on the sidecar's event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from pannier.daemon import doctor_checks
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.spool.spool import Spool
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc
from pannier.wire.errors import PannierError

_SLACK_S: Final = 10.0
"""For the answers of both daemons to come, on top of what storage may take."""


class SidecarDiagnosis(diagnosis_pb2_grpc.DiagnosisServicer):
    """Args: the running sidecar's parts; ``descriptors`` as in Welcome; ``confined``: callers must not make
    the coordinator write where the sidecar may not.
    """

    def __init__(
        self,
        config: SidecarConfig,
        *,
        spool: Spool,
        saves: SaveRegistry,
        coordinator: CoordinatorClient,
        descriptors: Callable[[], str],
        confined: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._config = config
        self._spool = spool
        self._saves = saves
        self._coordinator = coordinator
        self._descriptors = descriptors
        self._confined = confined
        self._loop = loop

    def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: grpc.ServicerContext
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        work = asyncio.run_coroutine_threadsafe(self.diagnose(request), self._loop)

        def cancel() -> None:
            work.cancel()

        context.add_callback(cancel)
        return work.result()

    async def diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest
    ) -> diagnosis_pb2.DiagnoseResponse:
        """The whole diagnosis. On the loop."""
        own, theirs = await asyncio.gather(
            doctor_checks.diagnose(
                request,
                daemon="sidecar",
                host=self._config.host,
                own_checks=self._looks,
                allow=self._config.allow,
                storage_options=self._config.storage_options,
            ),
            self._ask_coordinator(request),
        )
        own.descriptors = self._descriptors()
        if isinstance(theirs, diagnosis_pb2.DiagnoseResponse):
            own.coordinator.CopyFrom(theirs)
            found = f"the {self._coordinator.description} answers, version {theirs.version}"
            own.checks.append(doctor_checks.ok("coordinator", found))
        else:
            own.checks.append(
                doctor_checks.failed(
                    "coordinator",
                    f"the {self._coordinator.description}: {theirs}",
                    "saves wait for it. Does it run, is --coordinator right, and do both sides' "
                    "certificates come from one CA?",
                )
            )
        return own

    def _looks(self) -> Iterator[diagnosis_pb2.Check]:
        yield doctor_checks.check_state(draining=self._saves.draining)
        spool = self._spool
        yield doctor_checks.check_spool(
            spool.directory, budget=spool.budget, reserved=spool.reserved, gone=spool.removed
        )

    async def _ask_coordinator(
        self, request: diagnosis_pb2.DiagnoseRequest
    ) -> diagnosis_pb2.DiagnoseResponse | PannierError:
        forwarded = diagnosis_pb2.DiagnoseRequest(timeout_s=request.timeout_s)
        # Else the caller would write with the coordinator's rights where this sidecar may not.
        if not self._confined or doctor_checks.is_allowed(request.root, self._config.allow):
            forwarded.root = request.root
        try:
            return await self._coordinator.diagnose(forwarded, (request.timeout_s or 20) + _SLACK_S)
        except PannierError as error:
            return error
