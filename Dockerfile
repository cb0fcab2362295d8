# Tandem's image: the same for routers, prefill and decode instances; the chart says what each container runs.
#
#   docker build -t tandem:0.1.0 .
#   docker build -t tandem:0.1.0-cuda --target cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu129 .
#
# Versions are those of constraints.txt. TORCH_INDEX is where torch's build comes from; a build of it (2.13.0+cpu) goes
# before PyPI's. EXTRAS are the optional parts: hub,models,nixl,kubernetes,structured-output,tracing.
# BASE is pinned by its tag; by its digest as well with --build-arg BASE=NAME:TAG@sha256:…
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,nixl,kubernetes,structured-output
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# torch by itself: a change of the code does not fetch it again.
COPY constraints.txt ./
RUN python -m venv /opt/tandem
RUN /opt/tandem/bin/pip install --constraint constraints.txt --extra-index-url ${TORCH_INDEX} torch
COPY . .
RUN /opt/tandem/bin/pip wheel --no-deps --wheel-dir /wheels .
RUN /opt/tandem/bin/pip install --constraint constraints.txt --extra-index-url ${TORCH_INDEX} \
    "$(ls /wheels/tandem_llm-*.whl)[${EXTRAS}]"

FROM ${BASE} AS runtime
# The user that the chart runs it as. Nothing of the image is theirs to write.
RUN groupadd --gid 65532 tandem && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A container's published ports lead to its own address, not to its loopback.
ENV TANDEM_SERVER__HOST=0.0.0.0
RUN mkdir -p /models && ln -s "$(python -c 'from tandem.demo import MODEL_DIR; print(MODEL_DIR)')" /models/demo
WORKDIR /tmp
USER 65532:65532
EXPOSE 50051 50053 50054 9090
CMD ["tandem", "--help"]

# With TORCH_INDEX of a CUDA build. Its libraries come with torch; the driver is the node's. Triton calls a C compiler at
# its first launch.
FROM runtime AS cuda
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
