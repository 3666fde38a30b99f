"""``Diagnosis`` of a sidecar that serves several jobs: the checks of each, with its name.

On the event loop.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pannier.daemon import doctor_checks
from pannier.daemon.status_service import DaemonInfo
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.diagnosis import SidecarDiagnosis
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc


class JobSidecar(Protocol):
    """The sidecar of one job."""

    @property
    def config(self) -> SidecarConfig:
        """Its settings."""

    @property
    def diagnosis(self) -> SidecarDiagnosis:
        """Its own diagnosis."""


class MultiJobDiagnosis(diagnosis_pb2_grpc.DiagnosisServicer):
    """Args: the sidecar's settings and state, the jobs' sidecars, and problems of jobs."""

    def __init__(
        self,
        config: SidecarConfig,
        *,
        daemon_info: DaemonInfo,
        sidecars: Callable[[], Mapping[str, JobSidecar]],
        problems: Callable[[], Sequence[str]],
    ) -> None:
        self._config = config
        self._daemon_info = daemon_info
        self._sidecars = sidecars
        self._problems = problems

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        sidecars = self._sidecars()
        roots = [root for each in sidecars.values() for root in each.config.allow]
        # Without the root: all jobs but one would refuse it.
        plain = diagnosis_pb2.DiagnoseRequest(timeout_s=request.timeout_s)
        own, *theirs = await asyncio.gather(
            doctor_checks.diagnose(
                request,
                daemon="sidecar",
                host=self._config.host,
                own_checks=lambda: [
                    doctor_checks.check_state(draining=self._daemon_info.draining),
                    self._check_jobs(),
                ],
                allow=roots,
                storage_options=self._config.storage_options,
            ),
            *(each.diagnosis.diagnose(plain) for each in sidecars.values()),
        )
        for job, answer in zip(sidecars, theirs, strict=True):
            for check in (*answer.checks, *answer.coordinator.checks):
                check.found = f"job {job}: {check.found}"
                own.checks.append(check)
        return own

    def _check_jobs(self) -> diagnosis_pb2.Check:
        problems = self._problems()
        names = ", ".join(self._sidecars()) or "none"
        found = f"{names}; below {self._config.jobs}, as user {os.geteuid()}"
        if problems:
            return doctor_checks.failed("jobs", "; ".join(problems), f"served are {found}")
        return doctor_checks.ok("jobs", found)
