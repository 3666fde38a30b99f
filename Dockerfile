# Two images from one file: `sidecar` (no torch) and `coordinator` (CPU torch, whose planner and
# metadata it runs). See deploy/README.md for how to build, run and deploy them.
#
# The versions are those of requirements.lock. For the same base each time, give its digest:
#   docker build --build-arg BASE=python:3.11.14-slim-bookworm@sha256:... --target sidecar .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS sidecar-environment
ARG EXTRAS=gcs,s3
WORKDIR /build
RUN python3 -m venv --without-pip /opt/pannier
COPY . .
# Bytecode that isn't checked against sources: the file system is read-only, and a start is quick.
RUN python3 -m pip --python /opt/pannier/bin/python install --no-cache-dir --no-compile \
        --constraint requirements.lock ".[${EXTRAS}]" \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/pannier/lib

FROM sidecar-environment AS coordinator-environment
# PyTorch's CPU index, as its "Get started" page names it: elsewhere torch brings CUDA along. What is
# left out of the compilation is for later versions of Python.
ARG TORCH_INDEX=
# Of the stage before, which not every builder hands on.
ARG EXTRAS=gcs,s3
RUN python3 -m pip --python /opt/pannier/bin/python install --no-cache-dir --no-compile \
        --constraint requirements.lock ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        ".[torch,${EXTRAS}]" \
    && /opt/pannier/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda and "torch with \
CUDA was installed: --build-arg TORCH_INDEX=... names an index of CPU builds")' \
    && python3 -m compileall -q --invalidation-mode unchecked-hash -x torch/testing/_internal \
        /opt/pannier/lib

FROM base AS runtime
ARG REVISION=unknown
LABEL org.opencontainers.image.version=0.1.0 \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.vendor=Pannier
# A number, so that Kubernetes can tell that it isn't root's.
RUN groupadd --gid 65532 pannier \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp pannier \
    && install --directory --mode 0700 --owner 65532 --group 65532 /run/pannier /spool
ENV PATH=/opt/pannier/bin:${PATH} \
    HOME=/tmp
USER 65532:65532
WORKDIR /tmp
# It handles SIGTERM itself and has no children, so it needs no init as PID 1.
STOPSIGNAL SIGTERM
ENTRYPOINT ["pannier"]

FROM runtime AS coordinator
LABEL org.opencontainers.image.title=pannier-coordinator \
      org.opencontainers.image.description="Plans and commits the PyTorch checkpoints of a job"
COPY --from=coordinator-environment /opt/pannier /opt/pannier
ENV PANNIER_ADDRESS=unix:///run/pannier/coordinator.sock \
    PANNIER_SIDECAR=unix:///run/pannier/coordinator.sock
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["pannier", "health"]
CMD ["coordinator"]

FROM runtime AS sidecar
LABEL org.opencontainers.image.title=pannier-sidecar \
      org.opencontainers.image.description="Uploads the PyTorch checkpoints of a host's ranks to object storage"
COPY --from=sidecar-environment /opt/pannier /opt/pannier
ENV PANNIER_ADDRESS=unix:///run/pannier/sidecar.sock \
    PANNIER_SIDECAR=unix:///run/pannier/sidecar.sock \
    PANNIER_SPOOL=/spool
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["pannier", "health"]
CMD ["sidecar"]
