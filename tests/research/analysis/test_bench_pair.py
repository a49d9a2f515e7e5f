"""The pair of known law has the law it is built to have; transformers and the engine agree on
it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.gguf.folder import folder_of
from engine.models.importing import import_transformers
from research.analysis import peer_arms, peers
from research.analysis.llama_cpp_arm import _gguf_name, _interleaved, gguf_of
from research.demo import bench_pair
from tests.models.gguf_models import write_model
from tests.wrong import instead

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 4096
transformers = import_transformers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pair."""
    path = tmp_path_factory.mktemp("pair")
    bench_pair.write(path, "draft", "tiny", VOCABULARY, 0.6, 512)
    return path


def logits(model: Any, texts: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=texts).logits[:, -1]


@pytest.mark.slow
def test_the_next_token_depends_on_the_last_one_as_the_table_says(folder: Path) -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    tokens_VS, below_VS = bench_pair.successors(VOCABULARY, seed=1)
    last = torch.arange(300, 340)
    before = torch.randint(300, 4000, (2, 40, 5), generator=torch.Generator().manual_seed(0))
    found = [logits(target, torch.cat([text, last[:, None]], 1)) for text in before]
    # What stands before the last token changes the law by a little only, and the table is met.
    assert (found[0].softmax(-1) - found[1].softmax(-1)).abs().sum(-1).max() < 0.2
    likely = found[0].gather(1, tokens_VS[last])
    assert (likely - bench_pair._LIKELIHOOD - below_VS[last]).abs().max() < 1.0
    assert found[0].softmax(-1).gather(1, tokens_VS[last]).sum(-1).mean() > 0.7


@pytest.mark.slow
def test_acceptance_is_a_dial(folder: Path) -> None:
    about = json.loads((folder / "pair.json").read_text())
    assert about["single_draft_acceptance"] == pytest.approx(0.6, abs=0.05)
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft")]
    assert bench_pair.acceptance(*models) == pytest.approx(about["single_draft_acceptance"], abs=0.02)


def test_acceptance_is_that_of_rounded_weights_too(tmp_path: Path) -> None:
    """Served in float32 arithmetic, as the engine and llama.cpp read a checkpoint in bfloat16."""
    about = bench_pair.write(tmp_path, "tiny", "tiny", 1024, 0.7, 64, torch.bfloat16)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path / "target", dtype="auto").dtype == torch.bfloat16
    models = [load(tmp_path / name, dtype=torch.float32) for name in ("target", "draft")]
    assert about["single_draft_acceptance"] == pytest.approx(0.7, abs=0.05)
    assert bench_pair.acceptance(*models) == pytest.approx(about["single_draft_acceptance"], abs=0.02)


def test_large_sizes_are_those_of_qwen3() -> None:
    """Its norms of queries and keys run in the check of a device, and its table is met."""
    assert {bench_pair.SIZES[name].model_type for name in ("8b", "0.6b")} == {"qwen3"}
    size = replace(bench_pair.SIZES["draft"], model_type="qwen3")
    tokens_VS, below_VS = bench_pair.successors(VOCABULARY, seed=1)
    model = bench_pair.build(size, VOCABULARY, tokens_VS, below_VS, 64, 2)
    assert model.config.model_type == "qwen3"
    assert model.model.layers[0].self_attn.q_norm.weight.shape == (size.head_dim,)
    last = torch.arange(300, 340)
    likely = logits(model, last[:, None]).gather(1, tokens_VS[last])
    assert (likely - bench_pair._LIKELIHOOD - below_VS[last]).abs().max() < 1.0


def test_successors_are_spread_over_the_vocabulary() -> None:
    tokens_VS, below_VS = bench_pair.successors(50, seed=3)
    assert all(sorted(column.tolist()) == list(range(50)) for column in tokens_VS.T)
    assert below_VS[:, 0].abs().max() == 0
    assert (below_VS.diff(dim=1) <= 0).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peers_agree_and_are_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "peers.json"
    optional = ["--llama-cpp-types", "f32"] if find_spec("llama_cpp") and find_spec("gguf") else []
    few = ("--concurrency", "2", "--repeats", "1", "--warm-up", "0", "--tokens", "6", "--prompt", "9", "--threads", "1")
    arms = ("--shapes", "block:1x2", "bv_race:2x2")
    words = [str(folder / "target"), str(folder / "draft"), *arms, *few, *optional, "--output", str(output)]
    # Continuous batching takes a minute to start and stop.
    with instead(peer_arms.Transformers, "continuous", lambda _, arm, *operands: arm.generate(*operands)):
        assert peers.main(words) == 0
    result = json.loads(output.read_text())
    assert all(result["greedy_answers_equal_generate"].values())
    (cell,) = result["cells"]
    assert cell["arms"].keys() == result["greedy_answers_equal_generate"].keys()
    assert all(arm["tokens_per_second"] > 0 for arm in cell["arms"].values())
    assert peers.markdown(result) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_gguf_file_is_compared_as_it_is(has_draft: bool, tmp_path: Path) -> None:
    """Without a draft model nothing is drafted, and llama.cpp reads the same file where its library
    is installed.
    """
    file, output = str(write_model(tmp_path / "model.gguf", "llama", "Q8_0")), tmp_path / "peers.json"
    few = ("--concurrency", "1", "--repeats", "1", "--warm-up", "0", "--tokens", "4", "--prompt", "6", "--threads", "1")
    without = ["continuous", *([] if find_spec("llama_cpp") else ["llama.cpp"])]
    words = [file, *([file] if has_draft else []), *few, "--without", *without, "--output", str(output)]
    assert peers.main(words) == 0
    (cell,) = json.loads(output.read_text())["cells"]
    drafting = {peers.OWN, "transformers assisted", "llama.cpp with 3 drafts"}
    assert bool(drafting & cell["arms"].keys()) == has_draft
    assert {peers.OFF, peers.GENERATE} <= cell["arms"].keys()
    assert ("llama.cpp" in cell["arms"]) == (find_spec("llama_cpp") is not None)


def test_types_that_llama_cpp_cannot_have_are_refused(folder: Path, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    derived = folder_of(file, str(tmp_path / "cache"))
    for place, kind, known in ((derived, "q4_0", "file"), (folder / "target", "file", "f32")):
        with pytest.raises(ConfigError, match=rf"as {known}.*not {kind}"), gguf_of(place, kind):
            pass
    with gguf_of(derived, "file") as found:
        assert found == file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_prompts_are_compared_beyond_the_positions_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    reach = json.loads((folder / "target" / "config.json").read_text())["max_position_embeddings"]
    output = tmp_path / "prompts.json"
    few = ("--concurrency", "1", "--repeats", "1", "--warm-up", "0", "--threads", "1", "--without", "assisted", "cont")
    words = [str(folder / "target"), str(folder / "draft"), *few, "--prompt-tokens", f"9,{reach + 30}"]
    assert peers.main([*words, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [cell["prompt"] for cell in result["cells"]] == [9, reach + 30]
    for cell in result["cells"]:
        for arm in cell["arms"].values():
            assert arm["tokens_per_second"] == pytest.approx(cell["prompt"] / arm["seconds"][0])
    assert all(result["greedy_answers_equal_generate"].values())


@pytest.mark.filterwarnings("ignore")
def test_greedy_peers_do_not_sample_as_the_checkpoint_says(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder / "target", tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 50.0}))
    options = ["--tokens", "3", str(target), str(folder / "draft")]
    arm = peer_arms.Transformers(peers.parser().parse_args(options))
    (answer,) = arm.generate([[300, 301]], 0.0)
    texts = torch.tensor([[300, 301, *answer]])
    with torch.inference_mode():
        assert answer == arm.target(input_ids=texts).logits[0, 1:-1].argmax(-1).tolist()
    assert arm.assisted([[300, 301]], 0.0) == [answer]


def test_the_names_and_heads_that_llama_cpp_reads() -> None:
    assert _gguf_name("lm_head.weight") == "output.weight"
    assert _gguf_name("model.norm.weight") == "output_norm.weight"
    assert _gguf_name("model.layers.11.self_attn.k_proj.weight") == "blk.11.attn_k.weight"
    assert _gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    # Rotated by halves here and by neighbours there, two vectors have the same product.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 16, 5, generator=generator)
    inputs, angle = torch.randn(2, 5, generator=generator), torch.randn(2, 4, generator=generator)

    def by_halves(vector: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        a, b = vector.view(2, 2, 4).unbind(1)
        return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    def by_neighbours(vector: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        a, b = vector.view(2, 4, 2).unbind(2)
        return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 2)

    here = [by_halves(weights[i] @ inputs[i], angle[i]) for i in range(2)]
    there = [by_neighbours(_interleaved(weights[i], 2) @ inputs[i], angle[i]) for i in range(2)]
    products = [(a.flatten(1) * b.flatten(1)).sum(1) for a, b in (here, there)]
    assert torch.allclose(*products, atol=1e-5)
