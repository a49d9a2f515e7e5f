"""MTP modules inside targets: transformers' logits, and the distribution of answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention.tensors import NORMED
from engine.config import MTP, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.drafting import reading
from engine.drafting.eagle import EagleDrafter
from engine.errors import ConfigError, LoadError
from engine.heads.config import HeadConfig
from engine.heads.loading import build_head, shapes_of
from engine.heads.mtp import Mtp, mtp_tensors, read_mtp
from engine.models import taps
from engine.models.wrappers import plain_name, wrapped_names
from engine.scheduling.scheduler import Scheduler
from engine.start.building import build_engine
from engine.start.loading import LoadedModel
from server.settings.model_checks import check_pair, with_sources
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders, oracles
from tests.heads.recording import SPECULATIONS, VOCABULARY, Recorder, largest_error, served
from tests.heads.test_eagle import keeping_drafts, of_another_token, of_the_first_parent
from tests.models import families
from tests.wrong import instead

Pair = tuple[LoadedModel, folders.Written]
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and where it is with its module."""
    written = folders.write_mtp(tmp_path_factory.mktemp("mtp") / "target", VOCABULARY)
    return folders.load_target(written), written


def errors(pair: Pair, recorder: Recorder, texts: list[list[int]], most: int = 40) -> float:
    return largest_error(*pair, oracles.Module(pair[1], pair[0]), recorder, texts, most)


@pytest.mark.sole("logits of a module inside a target")
@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(SPECULATIONS, {"chains", "tree"}))
def test_logits_are_those_of_transformers_whatever_came_before(pair: Pair, name: str) -> None:
    """After chunks of prompts, shared beginnings, drafts and preemption."""
    recorder, texts = served(*pair, SPECULATIONS[name])
    assert any(node.path for node in recorder.nodes)
    assert errors(pair, recorder, texts) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_module_of_a_hybrid_target(tmp_path: Path, name: str, speculation: str) -> None:
    """After chunks of prompts, shared beginnings, drafts and preemption."""
    written = folders.write_hybrid_mtp(tmp_path / "target", VOCABULARY, name)
    target = folders.load_target(written)
    recorder, texts = served(target, written, SPECULATIONS[speculation])
    assert largest_error(target, written, oracles.HybridModule(written, target), recorder, texts) < 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_answers_of_a_hybrid_with_its_module(tmp_path: Path, name: str) -> None:
    """Few tokens, so that a random module is right now and then."""
    written = folders.write_hybrid_mtp(tmp_path / "target", 12, name, stacked=True)
    target = folders.load_target(written)
    prompts = tiny.prompts(12, (3, 30, 41))
    expected = {str(i): families.generated(target, prompt, 24) for i, prompt in enumerate(prompts)}
    engine = tiny.build(target, folders.load(written, target))
    requests = [tiny.request(str(i), prompt, SPECULATIONS["chains"], 24) for i, prompt in enumerate(prompts)]
    for _ in range(2):  # the second time, the prompts begin in the cache
        run = tiny.run(engine, requests)
        assert run.tokens == expected
        assert run.num_accepted > 0


def before_the_norm(hook: Any, model: Any, tap: int, observe: Any) -> Any:
    return hook(model, len(taps.layers_of(model)) if tap == NORMED else tap, observe)


def joined_the_other_way(forward: Any, module: Mtp, *rows: Any) -> Any:
    with instead(torch, "cat", lambda cat, parts, dim=0: cat(parts[::-1] if dim == -1 else parts, dim)):
        return forward(module, *rows)


def without_norm(forward: Any, module: Mtp, *rows: Any) -> Any:
    """Feed back and read the state before the module's norm."""
    with instead(module.norm, "forward", lambda _, state: state):
        return forward(module, *rows)


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "states before the final norm": (taps, "_hook", before_the_norm),
    "states of another token": (reading, "_slots_before", of_another_token),
    "states of another parent": ("engine.drafting.head", "places_of", of_the_first_parent),
    "accepted rows as they were drafted": (Scheduler, "_append", keeping_drafts),
    "state before embedding": (Mtp, "forward", joined_the_other_way),
    "states without the module's norm": (Mtp, "forward", without_norm),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(WRONG, {"states before the final norm", "states of another token"}))
def test_wrong_variants_are_found_out(pair: Pair, name: str) -> None:
    with instead(*WRONG[name]):
        recorder, texts = served(*pair, SPECULATIONS["chains"])
    assert errors(pair, recorder, texts) > 1e-2


# -- the start -------------------------------------------------------------------------------------


def config_of(written: folders.Written, rule: str = "bv_race", **parts: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target=str(written.folder), draft=MTP, device="cpu", **parts),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=4),
        speculation=SpeculationConfig(rule=rule, draft_length=3),
    )


def edit(written: folders.Written, **changed: Any) -> None:
    path = written.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_a_target_starts_with_its_module(tmp_path: Path, shards: bool) -> None:
    """Only its files are read, and copies of the target's weights are left out."""
    written = folders.write_mtp(tmp_path / "target", shards=shards)
    config = config_of(written)
    check_pair(with_sources(config).model)
    engine = build_engine(config)
    assert isinstance(engine.drafter, EagleDrafter)
    assert engine.target.storage.taps == (NORMED,)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    of_tensors, of_copies = (
        sum(one.nbytes for name, one in written.tensors.items() if name.endswith(copies) == is_copy)
        for is_copy in (False, True)
    )
    least = of_tensors + 2 * 4 * folders.HEAD_DIM // 4 + 97 * folders.TARGET_WIDTH * 4
    # Blocks of weights are filled up.
    assert least <= engine.facts.memory_plan["draft_weights"] < least + of_copies
    run = tiny.run(engine, [tiny.request("a", [1, 2, 3], SPECULATIONS["chains"], temperature=1.0)])
    assert max(outcome.draft_length for outcome in run.outcomes["a"]) == 3


@pytest.mark.parametrize("rule", ["greedy_block", "spectr_gbv"])
def test_rules_with_target_shifts_are_refused_before_weights_are_read(tmp_path: Path, rule: str) -> None:
    """The module's distribution after a text differs between steps."""
    written = folders.write_mtp(tmp_path / "target")
    told = (
        rf"^--spec-rule {rule}: .* would be biased with an MTP module: it needs .* same in every step; choose bv_race"
    )
    with instead("engine.start.building", "load_pair", folders.refused):
        with pytest.raises(ConfigError, match=told):
            build_engine(config_of(written, rule))
        with pytest.raises(AssertionError, match="weights are read"):
            build_engine(config_of(written))


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0; only one MTP module is served"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; only one"),
        ({"quantization_config": {"quant_method": "fp8"}}, "of quantised checkpoints are not served"),
        ({"model_type": "qwen3"}, "MTP modules are served in glm4_moe, nemotron_h, .*, not in qwen3;"),
    ],
)
def test_targets_without_a_served_module_are_refused_before_weights_are_read(
    tmp_path: Path, edits: dict[str, Any], reason: str
) -> None:
    written = folders.write_mtp(tmp_path / "target")
    with instead("engine.start.building", "load_pair", folders.refused):
        with pytest.raises(AssertionError, match="weights are read"):
            build_engine(config_of(written))
        with pytest.raises(ConfigError, match="leave out --draft-revision"):
            build_engine(config_of(written, draft_revision="main"))
        edit(written, **edits)
        with pytest.raises(ConfigError, match=reason) as refusal:
            build_engine(config_of(written))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("", r"no weights of the head .model.layers.3.\* in "),
        ("mlp.experts.2.up_proj", r"the MTP module has 3 of 4 experts .up_proj"),
        ("eh_proj", "lacks tensors .eh_proj.weight"),
    ],
)
def test_modules_that_are_not_whole_are_refused(tmp_path: Path, lost: str, reason: str) -> None:
    written = folders.write_mtp(tmp_path / "target")
    path = written.folder / "model.safetensors"
    kept = {name: one for name, one in load_file(path).items() if not name.startswith(f"model.layers.3.{lost}")}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(LoadError, match=reason):
        build_engine(config_of(written))


@pytest.fixture(params=HYBRIDS[1:])
def mixture(request: pytest.FixtureRequest) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config of a mixture's module, and its weights with experts by number."""
    count = {"num_nextn_predict_layers" if request.param == "nemotron_h" else "mtp_num_hidden_layers": 1}
    config = read_mtp("mixture", families.config(request.param, **count).to_dict())
    return config, folders.experts_apart(
        {f"mtp.{name}": torch.randn(size) for name, size in shapes_of(config, 1).items()}
    )


def test_experts_by_number_become_stacks(mixture: tuple[HeadConfig, dict[str, Tensor]]) -> None:
    config, stored = mixture
    head = build_head(config, 1, mtp_tensors(config, stored))
    (experts,) = (module for name, module in head.named_modules() if name.endswith(".experts"))
    parts = [stored[name] for part in ("gate", "up") for name in stored if f".experts.2.{part}_proj." in name]
    (down,) = (tensor for name, tensor in stored.items() if ".experts.2.down_proj." in name)
    stack = experts.gate_up_proj if len(parts) == 2 else experts.up_proj
    assert stack[2].equal(torch.cat(parts))
    assert experts.down_proj[2].equal(down)
    assert len(head.kv_shape.layers) == 1  # experts store no K and V


@pytest.mark.parametrize(
    ("lost", "added", "reason"),
    [
        (".experts.2.up_proj.", "", "the MTP module has 3 of 4 experts .up_proj"),
        (".gate.", "", "lacks tensors .layers.*gate.weight"),
        (".experts.", "", "lacks tensors .layers.*experts.down_proj"),
        ("nothing", "mtp.layers.0.router.weight", "has unknown tensors .layers.0.router.weight"),
    ],
)
def test_mixtures_with_other_names_are_refused(
    mixture: tuple[HeadConfig, dict[str, Tensor]], lost: str, added: str, reason: str
) -> None:
    config, stored = mixture
    kept = {name: tensor for name, tensor in stored.items() if lost not in name}
    if added:
        kept[added] = torch.zeros(4, 32)
    with pytest.raises(LoadError, match=reason):
        build_head(config, 1, mtp_tensors(config, kept))


def test_names_in_wrappers_are_those_of_the_plain_module() -> None:
    config = read_mtp("module", families.config("qwen3_next").to_dict())
    for name in wrapped_names("mtp.layers.0.input_layernorm.weight"):
        assert list(mtp_tensors(config, {plain_name(name): torch.ones(1)})) == ["layers.0.input_layernorm.weight"]


def test_layers_of_a_module_are_served_in_one_order() -> None:
    raw = families.config("nemotron_h", num_nextn_predict_layers=1).to_dict() | {"mtp_layers_block_type": None}
    assert read_mtp("module", raw | {"mtp_hybrid_override_pattern": "*E"}).layers.num_hidden_layers == 2
    with pytest.raises(ConfigError, match=r"the MTP module has layers of .'moe', 'full_attention'., not"):
        read_mtp("module", raw | {"mtp_hybrid_override_pattern": "E*"})
