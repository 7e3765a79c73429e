# Ridgeline for CPUs: `docker build --tag ridgeline:latest .`
#   docker run --publish 8000:8000 --env RIDGELINE_API_KEY=… --volume cache:/cache ridgeline serve smollm2 --host 0.0.0.0
# For NVIDIA GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 --build-arg EXTRAS=[cuda]

ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/ridgeline \
 && /opt/ridgeline/bin/pip install --no-cache-dir "torch==${TORCH}" --index-url "${TORCH_INDEX}"
COPY pyproject.toml README.md LICENSE /src/
COPY native /src/native
COPY ridgeline /src/ridgeline
RUN /opt/ridgeline/bin/pip install --no-cache-dir "/src${EXTRAS}"
# What only builds, tests and debuggers of packages need, and byte code that Ridgeline never runs: 430 MB.
RUN packages=$(echo /opt/ridgeline/lib/python3.*/site-packages) \
 && rm -rf "$packages/torch/test" "$packages/torch/include" \
 && find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete \
 && for name in scipy sympy networkx mpmath; do \
      find "$packages/$name" -depth -type d -name tests -exec rm -rf {} +; done \
 && for name in sympy networkx mpmath torch/_inductor torch/_dynamo torch/testing torch/onnx; do \
      find "$packages/$name" -depth -type d -name __pycache__ -exec rm -rf {} +; done \
 && strip --strip-unneeded "$packages/torch/lib/libtorch_cpu.so" "$packages/torch/lib/libtorch_python.so"

FROM ${PYTHON_IMAGE}
# The kernels use OpenMP by the library that PyTorch brings along: nothing else has to be installed.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin ridgeline \
 && install --directory --owner=ridgeline --group=ridgeline /cache
COPY --from=build /opt/ridgeline /opt/ridgeline
ENV PATH=/opt/ridgeline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    HF_HOME=/cache \
    RIDGELINE_CACHE=/cache
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000 8080
# /health of a server, or of a gateway on its own port.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=4 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('RIDGELINE_PORT', '8000') + '/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["ridgeline"]
CMD ["serve", "--host", "0.0.0.0"]
