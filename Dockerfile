# Polydraft in two stages: install into a virtual environment, then copy it onto a clean base.
# Any Debian-based Python image works as the base, for instance one with CUDA.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# As in the Makefile: where torch itself comes from, for instance the index of CPU builds that PyTorch documents;
# without it, the default index's build, with CUDA.
ARG TORCH_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/polydraft
COPY constraints.txt pyproject.toml README.md ./
# All dependencies, by an install of Polydraft without its packages: a layer that edits of the source keep.
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
        /opt/polydraft/bin/pip install --index-url "$TORCH_INDEX_URL" --no-deps -c constraints.txt torch; \
    fi \
    && /opt/polydraft/bin/pip install -c constraints.txt .
COPY engine engine
COPY server server
COPY loadtest loadtest
RUN /opt/polydraft/bin/pip install --no-deps --force-reinstall .

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin polydraft
COPY --from=build /opt/polydraft /opt/polydraft
ENV PATH=/opt/polydraft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    POLYDRAFT_HOST=0.0.0.0 \
    POLYDRAFT_PORT=8000
USER 10001
WORKDIR /home/polydraft
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["polydraft", "serve"]
