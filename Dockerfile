# Polydraft in two stages: install into a virtual environment, then copy it onto a clean base.
# Any Debian-based Python image works as the base, for instance one with CUDA.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# As in the Makefile: where torch itself comes from, for instance the index of CPU builds that PyTorch documents;
# without it, the default index's build, with CUDA.
ARG TORCH_INDEX_URL=
WORKDIR /src
# Extras of Polydraft that the image has too: ray (deploy/ray_app.py), otel (traces); commas between several.
ARG EXTRAS=
RUN python -m venv /opt/polydraft
COPY constraints.txt pyproject.toml README.md ./
# All dependencies, by an install of Polydraft without its packages: this layer is cached while only the source changes.
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
        /opt/polydraft/bin/pip install --index-url "$TORCH_INDEX_URL" --no-deps -c constraints.txt torch; \
    fi \
    && /opt/polydraft/bin/pip install -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"
COPY LICENSE ./
COPY polydraft polydraft
COPY engine engine
COPY server server
COPY loadtest loadtest
COPY deploy/*.py deploy/
# The commit of this tree, for /version and the label below: --build-arg COMMIT=$(git rev-parse HEAD).
ARG COMMIT=
RUN if [ -n "$COMMIT" ]; then echo "$COMMIT" > server/commit.txt; fi \
    && /opt/polydraft/bin/pip install --no-deps --force-reinstall .

FROM ${BASE_IMAGE}
# On a CUDA device Triton needs a C compiler at run time: EXTRA_PACKAGES="gcc libc6-dev".
ARG EXTRA_PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$EXTRA_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $EXTRA_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
# A new volume mounted at .cache (models, profiles, compiled kernels) inherits its owner.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin polydraft \
    && install -d -o 10001 -g 10001 /home/polydraft/.cache
COPY --from=build /opt/polydraft /opt/polydraft
ARG COMMIT=
LABEL org.opencontainers.image.revision=$COMMIT
ENV PATH=/opt/polydraft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/home/polydraft/.cache/triton \
    POLYDRAFT_HOST=0.0.0.0 \
    POLYDRAFT_PORT=8000
USER 10001
WORKDIR /home/polydraft
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; e = os.environ; tls = 'POLYDRAFT_SSL_CERTFILE' in e; r.urlopen(f'http{\"s\" * tls}://127.0.0.1:{e[\"POLYDRAFT_PORT\"]}/ready', timeout=2, context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["polydraft", "serve"]
