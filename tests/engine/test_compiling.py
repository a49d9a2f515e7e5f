"""Compiling the kernels of a first start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.models.host import usable_cores
from engine.step.compiling import compile_kernels

DEMO = Path(__file__).resolve().parents[2] / "demo"
START = """
import json
import sys
import numpy as np
from engine.config import ModelConfig
from engine.models import numba_decoder as nd
from engine.step.compiling import compile_kernels
said = []
compile_kernels(ModelConfig(target=sys.argv[1], device="cpu"), said.append)
functions = *nd.functions_of_weights(np.uint16), *nd.functions_of_kv(np.float32), nd.work()
print(json.dumps([len(said), [one.cache_hits for one in functions]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="one core compiles where the kernels are needed")
def test_a_first_start_compiles_what_it_and_later_starts_find(tmp_path: Path) -> None:
    def start() -> list[object]:
        command = [sys.executable, "-c", START, str(DEMO / "target")]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        found = subprocess.run(command, env=environment, capture_output=True, check=True, cwd=DEMO.parent)
        return list(json.loads(found.stdout.splitlines()[-1]))

    assert start() == [1, [1] * 6]
    assert start() == [0, [1] * 6]


def test_models_that_run_through_transformers_compile_nothing_ahead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    said: list[str] = []
    compile_kernels(ModelConfig(target=str(tmp_path), device="cpu"), said.append)
    assert not said
