# The server as an image: `docker build --tag slipstream:cpu .`, with an NVIDIA GPU `docker build --target cuda ...`.
# docs/deploy.md says how to run it. tests/deploy runs these instructions, as they stand, in a fresh Debian root.
#
# Both targets have a C compiler, since kernels are compiled at first use, for the processor that they run on: on a CPU
# our own (-march=native; the file's name has the processor in it), on a GPU those of Triton. An image is built on one
# machine and runs on others, so nothing is compiled here; the results stay in the volume /cache.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# The user is a number, so that Kubernetes can tell that it is not root. The volume is theirs.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin slipstream \
    && install --directory --owner 10001 --group 10001 /cache
# Open to other machines: `slipstream serve` does not start then without a key (SLIPSTREAM_API_KEY).
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/home/slipstream \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    SLIPSTREAM_HOST=0.0.0.0 \
    SLIPSTREAM_PORT=8000

# The packages, in a virtual environment that the images below copy: sources and scratch files stay behind. PyTorch
# first, so that a change of our code does not fetch it again.
FROM base AS cpu-packages
WORKDIR /src
COPY constraints.txt ./
# PyTorch's index of CPU builds; without it pip takes the usual build, with gigabytes of CUDA libraries.
ARG TORCH_INDEX
RUN python3 -m venv /opt/slipstream \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY slipstream slipstream
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --constraint constraints.txt .

FROM base AS cuda-packages
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/slipstream \
    && pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY slipstream slipstream
RUN pip install --no-cache-dir --constraint constraints.txt '.[cuda]'

# What both run. The port is that of the environment: change it there, not with --port, and the check follows.
FROM base AS run
WORKDIR /home/slipstream
USER 10001:10001
VOLUME /cache
EXPOSE 8000
# SIGTERM drains: give `docker stop` more time than --drain.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --retries=4 CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['SLIPSTREAM_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["slipstream", "serve"]

# PyTorch's packages bring CUDA's libraries and Triton its assembler, so the base is the same; the driver comes from the
# host (`--gpus all`, NVIDIA's container toolkit).
FROM run AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-packages /opt/slipstream /opt/slipstream

# The last target is the default.
FROM run AS cpu
COPY --from=cpu-packages /opt/slipstream /opt/slipstream
