"""Heads by the CPU's decoder give their modules' numbers, with every flag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.cpu import head_decoder
from engine.cpu.compiled import pass_table
from engine.cpu.compiled.dot_products import HAS_PAIRS
from engine.cpu.decoder import CpuDecoder
from engine.cpu.head_decoder import HeadDecoder
from engine.cpu.weights import forms_of
from engine.heads.runner import HeadRunner, TorchHead
from engine.request import Speculation
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders, test_one_pass
from tests.heads.recording import VOCABULARY
from tests.heads.test_eagle import HEADS
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
BLOCK_SIZE = 4
CHAINS = Speculation(rule="bv_race", num_drafts=3, draft_length=3)
SHARING = {
    "width": folders.TARGET_WIDTH,
    "shares": ("embed_tokens", "lm_head"),
    "draft_vocabulary": VOCABULARY,
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return folders.target(VOCABULARY)


def backends(target: LoadedModel, head: LoadedModel, dtype: torch.dtype = torch.float32) -> tuple[TorchHead, Any]:
    target_decoder = CpuDecoder(target.model)
    return TorchHead(head.model), head_decoder.backend_of(
        head.model, head.model.kv_shape, target_decoder, dtype, BLOCK_SIZE
    )


def difference(head: LoadedModel, both: tuple[TorchHead, Any]) -> float:
    return head_decoder._difference(head.model, head.model.kv_shape, both, BLOCK_SIZE)


ALL = {**HEADS, **test_one_pass.HEADS}


def write(folder: Path, name: str, **more: Any) -> folders.Written:
    if name in HEADS:
        return folders.write_eagle(folder, **{**HEADS[name], **more})
    return test_one_pass.write(folder, name, **more)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ALL)
def test_numbers_are_those_of_the_modules(target: LoadedModel, tmp_path: Path, name: str) -> None:
    """States and products of a text and a tree, or of blocks."""
    head = folders.load(write(tmp_path / "head", name), target)
    both = backends(target, head)
    assert isinstance(both[1], HeadDecoder)
    assert difference(head, both) < 1e-4


def another_residual(self: HeadDecoder) -> None:
    self._put(pass_table.NORM_FLAGS, 1 - self._arrays[pass_table.NORM_FLAGS])


def another_norm(self: HeadDecoder) -> None:
    self._arrays[pass_table.NORMS][-1] *= 1.1


def words_of(self: HeadDecoder, field: int, layer: int = 0) -> Any:
    """The words of a product's only piece in a layer."""
    (piece,) = self.products[field].layers[layer]
    return piece.words


def another_weight(self: HeadDecoder) -> None:
    words_of(self, pass_table.ENTRY)[0, 0, 0] += 1


def another_projection(self: HeadDecoder) -> None:
    words_of(self, pass_table.PROJECTION)[0, 0, 0] += 1


def another_norm_of_the_target_s_states(self: HeadDecoder) -> None:
    self._arrays[pass_table.TARGET_NORMS][-1] *= 1.1


def another_causality(self: HeadDecoder) -> None:
    self._arrays[pass_table.VISIBLE_FIELDS][:] = self._arrays[pass_table.VISIBLE_FIELDS][::-1].copy()


def embeddings_that_are_not_scaled(self: HeadDecoder) -> None:
    self._arrays[pass_table.CONSTANTS][3] = 1


def no_convolution(self: HeadDecoder) -> None:
    self._arrays[pass_table.CONVOLUTIONS][-1, 1, 1] = 0


def kernels_that_do_not_depend_on_the_row(self: HeadDecoder) -> None:
    words_of(self, pass_table.KERNELS, -1)[:] = 0


def smaller_blocks(self: HeadDecoder) -> None:
    self._arrays[pass_table.BLOCK_SIZES][0] -= 1


def another_term(self: HeadDecoder) -> None:
    words_of(self, pass_table.TERM)[0, 0, 0] += 1


WRONG = [
    ("speculators", another_residual),
    ("speculators", another_norm),
    ("speculators", another_weight),
    ("speculators", another_projection),
    ("fc norm, norm of output", another_norm_of_the_target_s_states),
    ("norm before fc", another_norm_of_the_target_s_states),
    ("dflash", another_norm),
    ("dflash", another_projection),
    ("dflash, sliding layers are causal", another_causality),
    ("dflash2", embeddings_that_are_not_scaled),
    ("dflash2", no_convolution),
    ("dflash2", kernels_that_do_not_depend_on_the_row),
    ("dflash2", smaller_blocks),
    ("dspark", another_term),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_a_decoder_with_other_numbers_is_not_used(
    target: LoadedModel,
    tmp_path: Path,
    name: str,
    wrong: Callable[[HeadDecoder], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = folders.load(write(tmp_path / "head", name), target)

    def spoilt(made: Any, decoder: HeadDecoder, *of: Any) -> None:
        made(decoder, *of)
        wrong(decoder)

    with instead(HeadDecoder, "__init__", spoilt):
        assert isinstance(backends(target, head)[1], TorchHead)
    assert "runs without the CPU decoder" in caplog.text


def test_a_later_number_that_is_not_finite_is_noticed(target: LoadedModel, tmp_path: Path) -> None:
    head = folders.load(folders.write_eagle(tmp_path / "head"), target)

    def spoilt(tree: Any, head: Any, shape: Any, backend: Any, block_size: int) -> list[torch.Tensor]:
        *rest, last = tree(head, shape, backend, block_size)
        return [*rest, last * torch.nan if isinstance(backend, HeadDecoder) else last]

    assert isinstance(backends(target, head)[1], HeadDecoder)
    with instead(head_decoder, "_tree", spoilt):
        assert isinstance(backends(target, head)[1], TorchHead)


@pytest.mark.slow
def test_weights_are_stored_in_a_smaller_type_only_if_it_has_all_numbers(target: LoadedModel, tmp_path: Path) -> None:
    head = folders.load(folders.write_eagle(tmp_path / "head"), target)
    exact = backends(target, head, torch.bfloat16)
    assert exact[1].forms.layers == "float32"
    for weight in head_decoder._decoded_weights(head.model, {}):
        weight.data = weight.data.bfloat16().float()
    rounded = backends(target, head, torch.bfloat16)
    assert rounded[1].forms == forms_of(torch.bfloat16)
    assert rounded[1].weight_bytes < 0.7 * exact[1].weight_bytes
    assert difference(head, rounded) < (0.1 if HAS_PAIRS else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_the_target_do_not_choose_the_type_of_a_head_s_own(
    target: LoadedModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Embeddings that the target's decoder has are no weights of the head."""
    written = folders.write_eagle(tmp_path / "head", **SHARING)
    head = folders.load(written, target)
    for module in head_decoder._decoded_modules(head.model):
        module.weight.data = module.weight.data.bfloat16().float()
    assert backends(target, head, dtype)[1].forms == forms_of(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_head_may_have_weights_in_few_bits(target: LoadedModel, tmp_path: Path, weights: Any) -> None:
    """If it does not lie too far from its modules, as int4 does with random weights."""
    head = folders.load(folders.write_eagle(tmp_path / "head"), target)
    wanted = ModelConfig(target="t", draft="d", draft_weights=weights)
    found = HeadDecoder(head.model, TorchHead(head.model), torch.float32, wanted)
    assert found.forms == forms_of(torch.float32, weights)
    assert 1e-4 < difference(head, (TorchHead(head.model), found)) < (0.1 if weights == "int8" else 1)


def drafted(engine: Engine) -> list[int]:
    return tiny.run(engine, [tiny.request("a", range(5, 30), CHAINS, max_tokens=20, temperature=1.0, seed=3)]).tokens[
        "a"
    ]


def test_a_head_uses_the_embeddings_and_output_head_of_the_target_s_decoder(
    target: LoadedModel, tmp_path: Path
) -> None:
    """They take no further memory, and the head's own weights are given up."""
    written = folders.write_eagle(tmp_path / "head", **SHARING)
    head = folders.load(written, target)
    target_decoder = CpuDecoder(target.model)
    decoders = [HeadDecoder(head.model, one, torch.float32) for one in (target_decoder, TorchHead(head.model))]
    assert decoders[0].products[pass_table.LM_HEAD] is target_decoder.products[pass_table.LM_HEAD]
    assert decoders[0].products[pass_table.EMBEDDING] is target_decoder.products[pass_table.EMBEDDING]
    shared = [target_decoder.products[field] for field in (pass_table.LM_HEAD, pass_table.EMBEDDING)]
    vocabulary_bytes = {id(product): product.nbytes for product in shared}
    assert decoders[1].weight_bytes - decoders[0].weight_bytes == sum(vocabulary_bytes.values())
    assert difference(head, (TorchHead(head.model), decoders[0])) < 1e-4
    engine = tiny.build(target, head)
    before = drafted(engine)
    runner = engine.draft_runner
    assert isinstance(runner, HeadRunner)
    assert isinstance(runner.backend, HeadDecoder)
    runner.backend.prepare()
    assert all(not module.weight.numel() for module in head_decoder._decoded_modules(head.model))
    assert drafted(engine) == before


def test_an_output_head_with_a_bias_is_not_used_by_a_head(target: LoadedModel, tmp_path: Path) -> None:
    head = folders.load(folders.write_eagle(tmp_path / "head", **SHARING), target)
    target_decoder = CpuDecoder(target.model)
    target_decoder.products[pass_table.LM_HEAD].bias[0, 3] = 1
    found = HeadDecoder(head.model, target_decoder, torch.float32)
    assert found.products[pass_table.LM_HEAD] is not target_decoder.products[pass_table.LM_HEAD]
    assert difference(head, (TorchHead(head.model), found)) < 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(ALL, {"speculators", "dspark", "dflash2"}))
def test_answers_are_those_of_the_modules(target: LoadedModel, tmp_path: Path, name: str) -> None:
    """Equal tokens of answers, and equal numbers of accepted drafts, step by step."""
    written = write(tmp_path / "head", name, scale=0.3)
    found = []
    for is_decoded in (True, False):
        head = folders.load(written, target)
        with instead(head_decoder, "may_decode", lambda *_, is_decoded=is_decoded: is_decoded):
            engine = tiny.build(target, head)
        assert engine.draft_runner is not None
        assert engine.draft_runner.fast_paths["fast decoder"] == is_decoded
        prompts = tiny.prompts(VOCABULARY, [3, 30, 9], seed=1)
        requests = [
            tiny.request(str(number), prompt, CHAINS, max_tokens=20, temperature=2.0, seed=number)
            for number, prompt in enumerate(prompts)
        ]
        run = tiny.run(engine, requests)
        accepted = {key: [one.num_accepted for one in outcomes] for key, outcomes in run.outcomes.items()}
        found.append((run.tokens, accepted))
    assert found[0] == found[1]
    assert sum(map(sum, found[0][1].values())) > 0
