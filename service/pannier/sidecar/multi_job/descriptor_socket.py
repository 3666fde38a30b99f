"""The socket that passes descriptors, beside the sidecar's own: for one user, or for clients with a job's token.

In: the sidecar's settings. Out: a context that serves it. On the event loop.
"""

import os
from contextlib import AbstractAsyncContextManager

from pannier.daemon.listeners import private_socket, socket_path
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.auth import JobAuth
from pannier.sidecar.multi_job.sockets import job_socket
from pannier.sidecar.spool.fd_server import OpenForLoads, serving_descriptors
from pannier.sidecar.spool.mapped_files import MappedFiles


def descriptor_socket(
    config: SidecarConfig, auth: JobAuth | None, mapped: MappedFiles, open_for_loads: OpenForLoads
) -> AbstractAsyncContextManager[str] | None:
    """A context that serves the socket and yields its name; None where trainers connect by TCP alone."""
    path = socket_path(config.address)
    if path is None:
        return None
    if auth is not None:
        return serving_descriptors(
            path, mapped, open_for_loads, job_socket, allowed=None, accepts=auth.accepts
        )
    return serving_descriptors(
        path,
        mapped,
        open_for_loads,
        lambda beside: private_socket(beside, config.allow_uid),
        allowed={os.geteuid(), 0, *config.allow_uid},
    )
