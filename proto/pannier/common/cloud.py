"""Whether a machine's or pod's credentials come from a metadata server, which may be late.

GKE's serves no sooner than some seconds after a pod has started: requests are refused or get 503
(https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity#limitations). EKS Pod Identity's agent
may be as late. So "no credentials" isn't final there at first.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_VARIABLES: Final = (
    "KUBERNETES_SERVICE_HOST",
    "GCE_METADATA_HOST",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
_VENDOR: Final = Path("/sys/class/dmi/id/sys_vendor")
_VENDORS: Final = ("Google", "Amazon EC2")


def may_be_late(environment: Mapping[str, str]) -> bool:
    """Whether credentials that weren't found may be there within seconds."""
    if any(environment.get(name) for name in _VARIABLES):
        return True
    with suppress(OSError):
        return _VENDOR.read_text().strip() in _VENDORS
    return False
