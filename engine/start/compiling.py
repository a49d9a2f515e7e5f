"""Compiles a CPU's kernels at a first start, in several processes.

Numba compiles on one core, and its cache serves this start and later ones. Other kernels are
compiled at their first call. A child process loads new files first, because LLVM ends a process
that loads wrong code. This module needs Numba, an optional package.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.config import ModelConfig
from engine.cpu.compiled import draw_loop, head_products, model_pass, product_phase
from engine.cpu.compiled_files import SUFFIX, damaged_files, load_all
from engine.cpu.compiler import cache_folder
from engine.cpu.weights import form_of_type, forms_of, function_of, is_on_tiles, types_of
from engine.models.gguf.blocks import Form
from engine.models.gguf.weights import file_behind, type_of_embeddings, types_of_matrices
from engine.models.kinds import may_decode
from engine.start.architectures import read_config
from engine.start.choosing import choose
from engine.start.host import usable_cores
from engine.start.loading import Progress
from engine.start.number_formats import file_dtype, multiplied_dtype

log = logging.getLogger("polydraft")

_LONGEST_S = 300.0
"""Longest wait for compiling processes, also of another start; they finish their jobs."""
_POLL_S = 0.1
_MARK = "compiled-"
_LOADED = "loaded"

Jobs = Mapping[str, Callable[[], object]]


def compile_kernels(config: ModelConfig, progress: Progress) -> None:
    """Compile the target's kernels unless cached; call it before torch has made threads."""
    jobs = jobs_of(config)
    folder = cache_folder()
    if jobs and folder is not None:
        fill(folder, jobs, progress)


def jobs_of(config: ModelConfig) -> Jobs:
    """Return the compilations for a target, the longest one first."""
    used = _forms_used(config)
    if not used.products:
        return {}
    stored = read_config(config.target, config.revision)
    products = {_name_of(form): partial(function_of, form) for form in used.products}
    if not may_decode(stored):
        has_latents = getattr(stored, "kv_lora_rank", None) is not None
        return {
            "kv-float32": lambda: model_pass.functions_of_kv(np.float32),
            "rows": lambda: choose(torch.device("cpu")),
            **products,
            "product": product_phase.work,
            **({"heads": head_products.work} if has_latents else {}),
        }
    kv = "uint16" if config.kv_dtype == "bfloat16" else "float32"
    return {
        f"kv-{kv}": lambda: model_pass.functions_of_kv(getattr(np, kv)),
        "rows": lambda: choose(torch.device("cpu")),
        **products,
        "work": model_pass.work,
        **{f"embeddings-{form}": partial(model_pass.beginning, *types_of(form)) for form in used.embeddings},
        "levels": draw_loop.draw,
    }


def _name_of(form: Form) -> str:
    """Return the name of the products with weights of a form."""
    return f"tiles-{form}" if is_on_tiles(form) else f"products-{form}"


class _Forms(NamedTuple):
    """Forms of the weights that a start reads."""

    products: frozenset[Form]
    embeddings: frozenset[Form]


def _forms_used(config: ModelConfig) -> _Forms:
    """Return the forms of target and draft weights; none without a CPU's decoder."""
    products: set[Form] = set()
    embeddings: set[Form] = set()
    dtype = multiplied_dtype(config)
    if dtype is None:
        return _Forms(frozenset(), frozenset())
    files = {name: file_behind(name) for name in (config.target, config.draft) if name is not None}
    loaded: set[tuple[torch.dtype, str]] = set()
    for file in filter(None, files.values()):
        file_type = file_dtype(file, config.dtype, torch.device("cpu"))
        if file_type is not None:
            loaded.add((file_type, "auto"))
            continue
        products |= {form_of_type(kind) for kind in types_of_matrices(file)}
        embedded = type_of_embeddings(file)
        if embedded is not None:
            embeddings.add(form_of_type(embedded))
    if None in files.values():
        # A draft model inherits the format of the target, and a head does not.
        loaded |= {(dtype, weights) for weights in (config.weights, config.draft_weights)}
    has_small_layers = not may_decode(read_config(config.target, config.revision))
    for loaded_type, weights in loaded:
        forms = forms_of(loaded_type, weights, config.activations == "auto")
        products |= set(forms)
        embeddings.add(forms.vocabulary)
        if has_small_layers:
            # Small layers of models in transformers' code keep the checkpoint's type.
            products.add(forms_of(loaded_type, may_round_rows=False).layers)
    return _Forms(frozenset(products), frozenset(embeddings))


def fill(folder: Path, jobs: Jobs, progress: Progress, longest_s: float = _LONGEST_S) -> None:
    """Fill a folder with the compiled code of all jobs, unless it is whole and loadable.

    jobs: functions that compile kernels, by a name. Another start that fills the
    folder is waited for.
    """
    ends_s = time.monotonic() + longest_s
    with _alone(folder, progress, ends_s):
        _forget_incomplete(folder)
        for _ in range(2):
            if _compile(folder, jobs, progress, ends_s) and _try_new_files(folder, ends_s):
                return
            log.warning("compiled kernels in %s end the process that loads them, so all are compiled again", folder)
            _forget(folder)


@contextmanager
def _alone(folder: Path, progress: Progress, ends_s: float) -> Iterator[None]:
    """Lock a folder against other starts. Forked processes hold the lock, too, until they end."""
    try:
        file = (folder / "lock").open("a")
    except OSError as error:
        log.warning("kernels are compiled without a lock, so starts at the same time compile them twice: %s", error)
        yield
        return
    with file:
        is_waiting = False
        while time.monotonic() < ends_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    progress("waiting for another process that compiles the kernels")
                is_waiting = True
                time.sleep(_POLL_S)
            except OSError as error:  # a network file system without locks
                log.warning("kernels are compiled without a lock on %s: %s", folder, error)
                break
        yield


def _forget_incomplete(folder: Path) -> None:
    """Remove damaged files. Remove the marks, too, if a file is damaged or missing."""
    damaged = damaged_files(folder)
    for path in damaged:
        log.warning("%s is damaged: its kernels are compiled again", path)
        path.unlink(missing_ok=True)
    if damaged or _loaded(folder) - _files(folder):
        _remove_marks(folder)


def _forget(folder: Path) -> None:
    _remove_marks(folder)
    for path in folder.rglob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _remove_marks(folder: Path) -> None:
    for path in [*folder.glob(f"{_MARK}*"), folder / _LOADED]:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> set[str]:
    """Return a line for each file of compiled code: its name, size and time."""
    lines = set()
    for path in folder.rglob(f"*{SUFFIX}"):
        facts = path.stat()
        lines.add(f"{path.relative_to(folder)} {facts.st_size} {facts.st_mtime_ns}")
    return lines


def _loaded(folder: Path) -> set[str]:
    """Return the lines (`_files`) of the files that a process has loaded without a crash."""
    try:
        return set((folder / _LOADED).read_text().splitlines())
    except OSError:
        return set()


def _compile(folder: Path, jobs: Jobs, progress: Progress, ends_s: float) -> bool:
    """Do the jobs that have no mark in several processes. Return whether no process has crashed."""
    left = {name: job for name, job in jobs.items() if not (folder / f"{_MARK}{name}").exists()}
    if not left:
        return True
    num_processes = min(usable_cores(), 4)
    progress(f"compiling kernels in {num_processes} processes" if num_processes > 1 else "compiling kernels")
    waiting = list(left.items())
    running: list[ForkProcess] = []
    while waiting or running:
        while waiting and len(running) < num_processes:
            name, job = waiting.pop(0)
            running.append(_start(job, folder / f"{_MARK}{name}"))
        ended = wait([process.sentinel for process in running], max(0.0, ends_s - time.monotonic()))
        if not ended:
            log.warning(
                "compiling kernels takes long: this process compiles what it needs, and others complete the rest"
            )
            return True
        if any(_crashed(process) for process in running if process.sentinel in ended):
            for process in running:
                process.kill()
                process.join()
            return False
        running = [process for process in running if process.sentinel not in ended]
    return True


def _try_new_files(folder: Path, ends_s: float) -> bool:
    """Load new files in a child process; return whether it has not crashed."""
    files = _files(folder)
    if files == _loaded(folder) or time.monotonic() > ends_s:
        return True
    process = _start(lambda: load_all(folder), folder / _LOADED, "\n".join(sorted(files)))
    process.join(max(0.0, ends_s - time.monotonic()))
    return not _crashed(process)


def _start(job: Callable[[], object], mark: Path, text: str = "") -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=_work, args=(job, mark, text), daemon=True)
    process.start()
    return process


def _work(job: Callable[[], object], mark: Path, text: str) -> None:
    """Do a job and write its mark; errors appear where the kernel is called."""
    torch.set_num_threads(1)
    try:
        job()
        mark.write_text(text)
    except Exception:
        return


def _crashed(process: ForkProcess) -> bool:
    """Whether a process was ended by a signal."""
    process.join(0 if process.exitcode is None else None)
    return process.exitcode is not None and process.exitcode < 0
