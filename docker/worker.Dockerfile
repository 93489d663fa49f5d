# Prefill and decode workers. Build from the repository's root, for CPUs:
#   docker build -f docker/worker.Dockerfile -t tandem-worker:0.1.0 .
# Bases are named by the tag of a version; put its digest behind it (`:TAG@sha256:...`) where builds must be repeatable.
# The kernels of the torch engine are compiled by g++ at the first start. GPUs are vLLM's: vllm.Dockerfile.
ARG BASE=python:3.11.11-slim-bookworm
FROM ${BASE}
ARG EXTRAS=worker
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/tandem
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY batches batches
COPY cluster cluster
COPY decode_worker decode_worker
COPY encode_worker encode_worker
COPY engine engine
COPY kvcache kvcache
COPY kvtransfer kvtransfer
COPY loans loans
COPY planner planner
COPY prefill_worker prefill_worker
COPY preprocessor preprocessor
COPY protos protos
COPY router router
COPY sizing sizing
COPY workloads workloads
COPY tandem tandem
COPY tandem_connector tandem_connector
COPY worker worker
RUN /opt/tandem/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[${EXTRAS}]"
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home tandem
USER 10001:10001
EXPOSE 50060 9400 20000-20999
ENTRYPOINT []
CMD ["python", "-m", "decode_worker", "--help"]
