# Workers whose engine is vLLM, their preprocessors and encode workers, on vLLM's own image. Build from the repository's root:
#   docker build -f docker/vllm.Dockerfile -t tandem-worker-vllm:0.1.0 .
# The front has an environment of its own; the engine process runs in vLLM's, where Tandem comes without dependencies.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
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
RUN /opt/tandem/bin/pip install -c constraints.txt ".[preprocessor]" \
    && python3 -m pip install --no-deps -c constraints.txt nixl-cu12 av soundfile .
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home tandem
USER 10001:10001
EXPOSE 50060 9400 20000-20999
ENTRYPOINT []
CMD ["python", "-m", "decode_worker", "--help"]
