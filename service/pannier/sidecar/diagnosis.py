"""``Diagnosis`` of a sidecar: its own checks, those of storage, and the coordinator's diagnosis.

On the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from pannier.common import timeouts
from pannier.daemon import doctor_checks
from pannier.maintenance.restore_check import Holder, check_restore
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.spool.spool import Spool
from pannier.storage.io_threads import reservation_threads
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc
from pannier.wire.errors import PannierError
from pannier.wire.version import ONE_VERSION, WIRE_VERSION, package_version


class SidecarDiagnosis(diagnosis_pb2_grpc.DiagnosisServicer):
    """``pannier.v1.Diagnosis`` of the running sidecar.

    Args:
        descriptors: as in Welcome.
        confined: callers must not make the coordinator write where the sidecar may not.
    """

    def __init__(
        self,
        config: SidecarConfig,
        *,
        spool: Spool,
        saves: SaveRegistry,
        coordinator: CoordinatorClient,
        local_copies: LocalCopies,
        descriptors: Callable[[], str],
        confined: bool,
    ) -> None:
        self._config = config
        self._spool = spool
        self._saves = saves
        self._coordinator = coordinator
        self._local_copies = local_copies
        self._descriptors = descriptors
        self._confined = confined

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        return await self.diagnose(request)

    async def diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest
    ) -> diagnosis_pb2.DiagnoseResponse:
        """The whole diagnosis."""
        spool = await reservation_threads.run(self._check_spool)
        state = doctor_checks.check_state(draining=self._saves.draining)
        own, theirs = await asyncio.gather(
            doctor_checks.diagnose(
                request,
                daemon="sidecar",
                host=self._config.host,
                own_checks=lambda: [state, spool],
                allow=self._config.allow,
                storage_options=self._config.storage_options,
                restore=self._check_restore,
            ),
            self._ask_coordinator(request),
        )
        own.descriptors = self._descriptors()
        if isinstance(theirs, diagnosis_pb2.DiagnoseResponse):
            own.coordinator.CopyFrom(theirs)
            found = f"the {self._coordinator.description} answers, version {theirs.version}"
            check = doctor_checks.ok("coordinator", found)
            if theirs.wire_version != WIRE_VERSION:
                found = f"the {self._coordinator.peer} is pannier {theirs.version}, protocol {theirs.wire_version}"
                check = doctor_checks.failed(
                    "coordinator",
                    f"{found}; this sidecar is {package_version()}, protocol {WIRE_VERSION}",
                    ONE_VERSION,
                )
            own.checks.append(check)
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

    async def _check_restore(self, root: str, timeout_s: float) -> diagnosis_pb2.Check:
        def holders(attempt: str) -> list[Holder]:
            return [
                Holder("this host", each.files, each.bytes)
                for each in self._local_copies.statuses()
                if each.attempt == attempt
            ]

        return await check_restore(
            root, self._config.storage_options, timeout_s, holders, allow=self._config.allow
        )

    def _check_spool(self) -> diagnosis_pb2.Check:
        spool = self._spool
        try:
            gone = spool.removed
        except PannierError as error:
            return doctor_checks.failed(
                "spool",
                str(error),
                "does its file system respond, and is it mounted? Then restart the sidecar",
            )
        return doctor_checks.check_spool(
            spool.directory,
            budget=spool.budget,
            reserved=spool.usage.reserved,
            gone=gone,
            limit=spool.limit(),
            # A default spool may usually have more than its container.
            too_large="" if self._config.spool is None else spool.too_large,
        )

    async def _ask_coordinator(
        self, request: diagnosis_pb2.DiagnoseRequest
    ) -> diagnosis_pb2.DiagnoseResponse | PannierError:
        forwarded = diagnosis_pb2.DiagnoseRequest(timeout_s=request.timeout_s)
        # Otherwise the caller could have the coordinator write where this sidecar may not.
        if not self._confined or await doctor_checks.is_allowed(request.root, self._config.allow):
            forwarded.root = request.root
        try:
            return await self._coordinator.diagnose(
                forwarded, (request.timeout_s or timeouts.DOCTOR_S) + timeouts.DOCTOR_SIDECAR_S
            )
        except PannierError as error:
            return error
