# syntax=docker/dockerfile:1
# Engines on GPUs, for `weightsync serve` and the Helm chart:   docker build --tag weightsync .
# The demo without a GPU, installed as `make` does it:          docker build --target cpu --tag weightsync-demo .

ARG UV=0.13.9
ARG CUDA=13.0.1
ARG UBUNTU=24.04

FROM ghcr.io/astral-sh/uv:${UV} AS uv

# --- the demo ----------------------------------------------------------------------------------------------------------------------

FROM python:3.12-slim-bookworm AS cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# What `make setup` asks for. Debian keeps no older versions, so a pin would break the build with the next one.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ git make \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home weightsync \
  && install --directory --owner=weightsync /home/weightsync/src
WORKDIR /home/weightsync/src
USER 10001:10001
COPY --chown=10001:10001 . .
ARG TORCH_INDEX=""
RUN make setup TORCH_INDEX="${TORCH_INDEX}"
# The demo's API takes a free port, and ends with the demo.
HEALTHCHECK NONE
CMD ["make", "demo"]

# --- what the image is made of -----------------------------------------------------------------------------------------------------

FROM nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
  && rm -rf /var/lib/apt/lists/*
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/weightsync
WORKDIR /src
COPY requirements/cuda.lock requirements/build.lock requirements/
RUN --mount=type=cache,target=/root/.cache/uv \
  uv venv --python /usr/bin/python3 /opt/weightsync \
  && uv pip install --require-hashes --requirements requirements/cuda.lock
COPY pyproject.toml README.md LICENSE ./
COPY weightsync weightsync
COPY trainer_adapters trainer_adapters
RUN --mount=type=cache,target=/root/.cache/uv \
  uv build --wheel --require-hashes --build-constraints requirements/build.lock --out-dir /tmp/dist \
  && uv pip install --no-deps /tmp/dist/*.whl
COPY deploy/image deploy/image
RUN deploy/image/triton.sh /opt/weightsync

# --- the image ---------------------------------------------------------------------------------------------------------------------

FROM nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU} AS cuda
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="weightsync" \
  org.opencontainers.image.description="vLLM engines that follow a trainer's weights" \
  org.opencontainers.image.licenses="Apache-2.0" \
  org.opencontainers.image.version="${VERSION}" \
  org.opencontainers.image.revision="${REVISION}"
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# wget: for KubeRay's probes and the one below. libibverbs: NCCL looks for it where there is RDMA.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 python3 wget \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home weightsync
COPY --from=build /opt/weightsync /opt/weightsync
# CC: stands for a compiler towards Triton (deploy/image/cc.sh). FlashInfer's sampler would want a real one.
ENV PATH=/opt/weightsync/bin:${PATH} \
  CC=/opt/weightsync/lib/triton/cc \
  VLLM_USE_FLASHINFER_SAMPLER=0 \
  VLLM_NO_USAGE_STATS=1 \
  PYTHONUNBUFFERED=1 \
  WEIGHTSYNC_API__HOST=0.0.0.0
WORKDIR /home/weightsync
USER 10001:10001
EXPOSE 8517
# `serve` answers when all engines have started: models loaded, graphs captured.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --retries=3 \
  CMD ["bash", "-c", "wget --quiet --tries=1 --timeout=8 --output-document=/dev/null http://127.0.0.1:${WEIGHTSYNC_API__PORT:-8517}/livez"]
ENTRYPOINT ["weightsync"]
CMD ["serve"]
