# Two targets: `docker build --target cpu .` and `docker build --target cuda .`
# Both run `skim serve` as an ordinary user, and keep models and compiled code in /cache.

# The parts that both targets share: a compiler, because kernels are compiled where they run, and a user.
FROM python:3.12-slim AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 skim \
    && mkdir /cache \
    && chown skim:skim /cache

# The package in a virtual environment, which the targets copy without the sources.
FROM base AS build
WORKDIR /build
RUN python -m venv /opt/skim
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE ./
COPY src ./src

# The usual torch has CUDA libraries of gigabytes. To leave them out, name PyTorch's index of CPU builds:
# --build-arg TORCH_INDEX=URL
FROM build AS build-cpu
ARG TORCH_INDEX=""
RUN /opt/skim/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[documents]"

FROM build AS build-cuda
RUN /opt/skim/bin/pip install ".[documents]"

FROM base AS serve
ENV PATH=/opt/skim/bin:$PATH SKIM_CACHE=/cache SKIM_HOST=0.0.0.0 SKIM_PORT=8000
WORKDIR /home/skim
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["skim", "serve"]

# torch's own packages bring CUDA; the host's driver comes with the NVIDIA container toolkit.
FROM serve AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/cache/triton
COPY --from=build-cuda /opt/skim /opt/skim
USER skim

FROM serve AS cpu
ENV SKIM_DEVICE=cpu
COPY --from=build-cpu /opt/skim /opt/skim
USER skim
