"""Compiling the kernels of a first start, and the files that it leaves for later ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.errors import LoadError
from engine.models.gguf.folder import folder_of
from engine.start import compiling
from engine.start.compiling import compile_kernels
from tests.grid import grid
from tests.models.converted import write_converted
from tests.models.gguf_models import write_model

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "server" / "demo"
START = """
import json
import sys
import numpy as np
import torch
from engine.config import ModelConfig
from engine.cpu.compiled import model_pass
from engine.cpu.weights import forms_of, function_of, types_of
from engine.start.compiling import compile_kernels
said = []
compile_kernels(ModelConfig(target=sys.argv[1], device="cpu"), said.append)
form = forms_of(torch.bfloat16).layers
functions = [model_pass.beginning(*types_of(form)), function_of(form), model_pass.work()]
functions += model_pass.functions_of_kv(np.float32)
print(json.dumps([len(said), [one.cache_hits for one in functions]]))
"""
KERNELS = """
from engine.cpu.compiler import compiled_for_cpu


@compiled_for_cpu()
def double(number):
    return 2 * number


@compiled_for_cpu()
def quadruple(number):
    return double(double(number))
"""
SMALL_START = """
import json
import logging
import sys
sys.path.insert(0, sys.argv[1])
import small_kernels
from engine.cpu.compiler import cache_folder
from engine.start.compiling import fill
logging.basicConfig(format="%(message)s")
said = []
fill(cache_folder(), {"small": lambda: (small_kernels.double(3), small_kernels.quadruple(3.0))}, said.append)
results = small_kernels.double(3), small_kernels.quadruple(3.0)
hits = [sum(one.stats.cache_hits.values()) for one in (small_kernels.double, small_kernels.quadruple)]
print(json.dumps([said, results, hits]))
"""


class Starts:
    """Starts of processes that share the cache of two small kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small_kernels.py").write_text(KERNELS)

    def begin(self) -> subprocess.Popen[str]:
        """Begin a start."""
        command = [sys.executable, "-c", SMALL_START, str(self.folder)]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(self.folder / "cache")}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    def end(self, process: subprocess.Popen[str]) -> tuple[list[str], list[int], str]:
        """Return (reports, cache hits by kernel, log) of a process with right results."""
        output, log = process.communicate()
        assert process.returncode == 0, log
        said, results, hits = json.loads(output.splitlines()[-1])
        assert results == [6, 12.0]
        return said, hits, log

    def run(self) -> tuple[list[str], list[int], str]:
        """Run a start to its end."""
        return self.end(self.begin())

    def files(self, pattern: str) -> list[Path]:
        """Return the files of the cache."""
        return sorted(path for path in (self.folder / "cache").rglob(pattern) if path.is_file())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Return starts of which the first has filled the cache."""
    starts = Starts(tmp_path_factory.mktemp("small"))
    said, hits, log = starts.run()
    assert ([len(said), min(hits), log]) == [1, 1, ""]
    return starts


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", grid([_cut, _empty, _flip], [_cut]))
def test_a_damaged_file_is_named_and_made_again_by_the_same_start(
    damage: Callable[[Path], None], small: Starts
) -> None:
    paths = small.files("*.nbc")
    for path in paths:
        damage(path)
    said, hits, log = small.run()
    assert (len(said), min(hits)) == (1, 1)
    assert sorted(log.splitlines()) == sorted(f"{path} is damaged: its kernels are compiled again" for path in paths)
    assert small.run() == ([], hits, "")


@pytest.mark.slow
def test_removed_files_are_made_again(small: Starts) -> None:
    small.files("*double*.nbc")[0].unlink()
    said, hits, _ = small.run()
    assert (len(said), min(hits)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", grid([_cut, _empty, Path.unlink], [_cut]))
def test_damaged_or_missing_marks_slow_no_later_start(damage: Callable[[Path], None], small: Starts) -> None:
    for path in [*small.files("compiled-*"), *small.files("loaded")]:
        damage(path)
    assert min(small.run()[1]) == 1
    assert small.run()[0] == []


@pytest.mark.slow  # damaged files are made again in the gate
def test_code_that_crashes_its_process_is_thrown_away_and_made_again(small: Starts) -> None:
    from engine.cpu.compiled_files import _checksum, checked

    path = small.files("*quadruple*.nbc")[0]
    code = checked(path.read_bytes())
    assert code is not None
    start = code.index(b"\x7fELF")
    wrong = code[:start] + bytes(200) + code[start + 200 :]
    path.write_bytes(wrong + _checksum(wrong))
    _, hits, log = small.run()
    assert min(hits) == 1
    assert "end the process that loads them, so all are compiled again" in log
    assert small.run()[2] == ""


@pytest.mark.slow
def test_starts_at_the_same_time_compile_once(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    found = [starts.end(process) for process in [starts.begin(), starts.begin()]]
    assert [min(hits) for _, hits, _ in found] == [1, 1]
    assert sum("compiling" in line for said, _, _ in found for line in said if "waiting" not in line) == 1


@pytest.mark.slow
def test_a_folder_that_holds_no_files_is_named_and_serves(small: Starts) -> None:
    paths = small.files("*.nbc")
    for path in paths:
        path.unlink()
        path.mkdir()
    _, _, log = small.run()
    for path in paths:
        path.rmdir()
    assert "compiled kernels are not stored in" in log


@pytest.mark.slow
def test_a_first_start_compiles_what_it_and_later_starts_find(tmp_path: Path) -> None:
    def start() -> list[object]:
        command = [sys.executable, "-c", START, str(DEMO / "target")]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        found = subprocess.run(command, env=environment, capture_output=True, check=True, cwd=ROOT)
        return list(json.loads(found.stdout.splitlines()[-1]))

    assert start() == [1, [1] * 6]
    assert start() == [0, [1] * 6]


def test_models_that_run_through_transformers_compile_nothing_ahead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    said: list[str] = []
    compile_kernels(ModelConfig(target=str(tmp_path), device="cpu"), said.append)
    assert not said


def test_a_start_compiles_the_types_of_its_files_alone(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target.gguf", "llama", {"ffn_down": "Q6_K", "token_embd": "Q8_0", "": "Q4_K"})
    folder = str(folder_of(target, str(tmp_path / "cache")))
    found = compiling._forms_used(ModelConfig(target=folder, device="cpu"))
    assert (found.products, found.embeddings) == ({"q4_k", "q6_k", "q8_0"}, {"q8_0"})
    beside = compiling._forms_used(ModelConfig(target=folder, draft=str(DEMO / "draft"), draft_weights="int4"))
    assert {"int4", "int8"} <= beside.products
    widened = compiling._forms_used(ModelConfig(target=folder, device="cpu", dtype="float32"))
    assert widened.products == {"float32"}


@pytest.mark.parametrize("kinds", [("IQ4_NL", "Q8_0"), ("Q8_0", "IQ4_NL")], ids=["target", "draft"])
def test_types_that_are_not_served_are_refused_before_kernels_are_compiled(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    files = [write_model(tmp_path / f"{kind}.gguf", "llama", kind) for kind in kinds]
    target, draft = (str(folder_of(file, "off")) for file in files)
    said: list[str] = []
    with pytest.raises(LoadError, match="tensors of type IQ4_NL are not served, only"):
        compile_kernels(ModelConfig(target=target, draft=draft, device="cpu"), said.append)
    assert not said


def test_the_type_to_which_a_file_is_dequantised_is_compiled(tmp_path: Path) -> None:
    write_converted(tmp_path / "draft.gguf", "gemma2", "IQ4_NL")
    target = folder_of(write_model(tmp_path / "target.gguf", "llama", "Q8_0"), "off")
    draft = folder_of(tmp_path / "draft.gguf", "off")
    found = compiling._forms_used(ModelConfig(target=str(target), draft=str(draft), device="cpu"))
    assert found.products == {"q8_0", "float32"}, "neither the file's types nor its configuration's type"


@pytest.mark.slow  # compiles everything once more
def test_passes_read_and_write_within_their_arrays(tmp_path: Path) -> None:
    """Compiled with checks of bounds, which end a pass with an error."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_BOUNDSCHECK": "1"}
    command = [sys.executable, "-m", "tests.compile_numba"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "IndexError" not in found.stderr
    assert "without the CPU decoder" not in found.stderr
