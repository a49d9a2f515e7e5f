"""An index of packages, from which uv resolves and installs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Wheels and further indexes in addition to the usual one.
LOCAL = {"UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_NO_INDEX", "UV_OFFLINE", "UV_CONSTRAINT"}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment, with pip's index for uv if uv has none."""
    result = {name: value for name, value in os.environ.items() if name not in LOCAL}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    configured = dict(re.findall(r"^([^=\n]+)='(.*)'$", listed.stdout, re.MULTILINE))
    names = {"cert": ("SSL_CERT_FILE",), "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL")}
    for pip_name, uv_names in names.items():
        places = (configured.get(f"{section}.{pip_name}") for section in (":env:", "install", "global"))
        if (value := next(filter(None, places), None)) and not any(name in result for name in uv_names):
            result[uv_names[0]] = value
    return result


def resolve(source: str, environment: dict[str, str], *more: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run uv's resolver; standard output has one line `name==version` for each package."""
    from uv import find_uv_bin  # `make test-all` installs it

    # Metadata of the few packages without wheels is made by the setuptools that is here: faster.
    options = "--quiet --no-header --no-annotate --no-build-isolation --no-python-downloads"
    command = [find_uv_bin(), "pip", "compile", source, *options.split(), "--python", sys.executable]
    command += ["--python-platform", "x86_64-manylinux_2_36"]
    return subprocess.run(
        [*command, *more], cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def index(environment: dict[str, str]) -> dict[str, str]:
    """The environment of uv, where it reaches an index of packages."""
    quick = environment | {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
    probe = resolve("-", quick, "--no-cache", stdin="iniconfig")
    if probe.returncode != 0:
        pytest.skip("no package index can be reached: " + " ".join(probe.stderr.split())[:300])
    return environment
