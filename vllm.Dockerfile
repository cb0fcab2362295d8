# Tandem on top of vLLM's own image: for instances with `instance.engine: vllm`. Routers run the image of the Dockerfile.
#
#   docker build -t tandem:0.1.0-vllm -f vllm.Dockerfile .
#
# Two environments, since vLLM's dependencies contradict Tandem's: /opt/tandem for the instance's server, and VLLM_PYTHON's,
# which has vLLM and gets Tandem without its dependencies. BASE is pinned by its tag; by its digest as well with
# --build-arg BASE=NAME:TAG@sha256:…. NIXL is the build of NIXL for the CUDA version of BASE.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,nixl,structured-output
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The server's torch computes nothing, so it is the CPU's.
COPY constraints.txt ./
RUN python3 -m venv /opt/tandem
RUN /opt/tandem/bin/pip install --constraint constraints.txt --extra-index-url ${TORCH_INDEX} torch
COPY . .
RUN /opt/tandem/bin/pip wheel --no-deps --wheel-dir /wheels .
RUN /opt/tandem/bin/pip install --constraint constraints.txt --extra-index-url ${TORCH_INDEX} \
    "$(ls /wheels/tandem_llm-*.whl)[${EXTRAS}]"

FROM ${BASE} AS vllm
ARG VLLM_PYTHON=/usr/bin/python3
ARG NIXL=nixl-cu13
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /tmp
COPY constraints.txt ./
COPY --from=build /wheels /wheels
RUN ${VLLM_PYTHON} -m pip install --no-deps --constraint constraints.txt /wheels/tandem_llm-*.whl redis hiredis nixl ${NIXL}
# The user that the chart runs it as. Nothing of the image is theirs to write.
RUN groupadd --gid 65532 tandem && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV TANDEM_SERVER__HOST=0.0.0.0
RUN mkdir -p /models && ln -s "$(python -c 'from tandem.demo import MODEL_DIR; print(MODEL_DIR)')" /models/demo
USER 65532:65532
EXPOSE 50051 50053 9090
ENTRYPOINT []
CMD ["tandem", "--help"]
