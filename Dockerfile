# The service with its default model inside: docker build -t headrace . && docker run -p 3000:3000 headrace
# The arguments of `docker run` are the launcher's flags.
FROM python:3.11-slim

# What pip installs as torch. The default build brings CUDA; for a CPU image give the CPU build:
#   --build-arg PIP_ARGS="..." with pip's options that pytorch.org gives for it
ARG TORCH=torch==2.13.0
ARG PIP_ARGS=

ENV PATH=/opt/venv/bin:$PATH HEADRACE_CACHE=/cache PYTHONUNBUFFERED=1

# The compiler of the CPU kernels.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

RUN python -m venv /opt/venv && pip install --no-cache-dir $PIP_ARGS "$TORCH"

WORKDIR /app
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proto proto
COPY launcher launcher
COPY router router
COPY shard shard
RUN pip install --no-cache-dir '.[redis]'

RUN headrace resolve

# Both folders may be volumes; a named volume takes its first content and owner from here.
RUN useradd --uid 1000 --create-home headrace && mkdir -p /run/headrace && chown -R headrace /cache /run/headrace
USER headrace

EXPOSE 3000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:3000/ready', timeout=4)"]
ENTRYPOINT ["headrace-launcher", "--hostname", "0.0.0.0", "--port", "3000"]
