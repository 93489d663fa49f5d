# Prefill and decode workers. Build from the repository's root, for CPUs:
#   docker build -f docker/worker.Dockerfile -t tandem-worker:0.1.0 .
# for NVIDIA GPUs:
#   docker build -f docker/worker.Dockerfile -t tandem-worker:0.1.0-cuda \
#     --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 --build-arg EXTRAS=worker,cuda \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# Bases are named by the tag of a version; put its digest behind it (`:TAG@sha256:...`) where builds must be repeatable.
# flashinfer compiles its kernels at their first use, hence a base with nvcc; a CPU's kernels are compiled by g++.
ARG BASE=python:3.11.11-slim-bookworm
FROM ${BASE}
ARG EXTRAS=worker
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 ninja-build \
    && if ! command -v python3 > /dev/null; then \
         apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; \
       fi \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/tandem
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY cluster cluster
COPY decode_worker decode_worker
COPY encode_worker encode_worker
COPY engine engine
COPY kvtransfer kvtransfer
COPY planner planner
COPY prefill_worker prefill_worker
COPY preprocessor preprocessor
COPY protos protos
COPY router router
COPY simulator simulator
COPY tandem tandem
RUN /opt/tandem/bin/pip install --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[${EXTRAS}]"
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home tandem
USER 10001:10001
EXPOSE 50060 9400 20000-20999
ENTRYPOINT []
CMD ["python", "-m", "decode_worker", "--help"]
