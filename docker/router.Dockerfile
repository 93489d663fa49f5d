# The router and the CLI: no torch, no NIXL, no Ray. Build from the repository's root:
#   docker build -f docker/router.Dockerfile -t tandem-router:0.1.0 .
FROM python:3.11.11-slim-bookworm AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tandem
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
RUN /opt/tandem/bin/pip install -c constraints.txt ".[gateway]"

FROM python:3.11.11-slim-bookworm
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home tandem
USER 10001:10001
EXPOSE 50051 8000 9400
ENTRYPOINT []
CMD ["python", "-m", "router", "--help"]
