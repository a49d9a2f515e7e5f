"""Heads that are trained for a tiny random target, and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill import losses
from distill.__main__ import main, parser, settings_of, shape_of, sizes_of
from distill.heads import KINDS, new_head
from distill.losses import LOSSES, Losses, TextBatch
from distill.target import Target
from distill.texts import Texts, TextSizes, sample_batch
from distill.training import Training, TrainingPlan
from engine.models.heads.head import HeadOutput
from engine.models.heads.loading import head_config, load_head
from engine.models.loading import load
from tests.engine import tiny
from tests.wrong import calls_of, instead

VOCABULARY, LENGTH, DEPTH = 97, 24, 3
TAPS = (1, 2, 4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    model = tiny.llama(seed=31, vocabulary=VOCABULARY, layers=4, spread=0.3).model
    model.config.bos_token_id = 1
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target(str(target_folder), None, TAPS, CPU)


@pytest.fixture(scope="module")
def texts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    found = Texts(tmp_path_factory.mktemp("texts"), TextSizes(num_batches=4, batch_size=8, length=LENGTH))
    found.sample(target, [(1,), (5, 6, 7)], seed=3)
    return found


def options_of(target: Path, output: Path, kind: str, *more: str) -> Any:
    words = ["--output", str(output), "--kind", kind, "--taps", "1,2,4", "--draft-length", str(DEPTH), "--threads", "1"]
    words += ["--length", str(LENGTH), "--sample-batch", "8", "--tokens", "800", "--epochs", "4", "--batch", "4"]
    return [str(target), *words, "--learning-rate", "0.01", *more]


def training_of(target: Target, texts: Texts, kind: str, file: Path, epochs: int = 4) -> Training:
    options = parser().parse_args(options_of(Path(target.name), file.parent, kind))
    shape = shape_of(options, target)
    schedule = TrainingPlan(epochs, 4, 0.01, DEPTH, 0.5, 0)
    head = new_head(shape, target, seed=0)
    return Training(head, kind, texts, schedule, settings_of(options, target, shape) | {"epochs": epochs}, file)


def test_states_are_those_of_a_pass_over_the_text(target: Target, texts: Texts) -> None:
    """States that were observed token by token while sampling, of prompts of different lengths."""
    rows = texts.rows([3, 9])
    seen = target.observe(rows["token_ids"].long(), None)
    for name, state in (("taps", seen.taps_BTX), ("last", seen.last_BTD)):
        assert (rows[name].float() - state.float()).abs().max() < 0.05 * state.float().abs().max()


def test_texts_depend_on_seed_and_number_alone(target: Target) -> None:
    one, again, other = (sample_batch(target, [(1,)] * 4, LENGTH, 3, number)["token_ids"] for number in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_texts_follow_the_targets_distribution(target: Target) -> None:
    drawn = sample_batch(target, [(1,)] * 4000, 2, 0, 0)
    counts = torch.bincount(drawn["token_ids"][:, 1].long(), minlength=VOCABULARY) / 4000
    expected = target.observe(torch.tensor([[1]]), None).logits_BV[0].softmax(-1)
    assert (counts - expected).abs().sum() < 0.12
    hotter = (target.observe(torch.tensor([[1]]), None).logits_BV[0] / 2).softmax(-1)
    assert (counts - hotter).abs().sum() > 0.12


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_of_the_logits_that_are_served(target: Target, texts: Texts, tmp_path: Path, kind: str) -> None:
    """At every depth below a text, against passes that know nothing of training."""
    assert error_of_logits(training_of(target, texts, kind, tmp_path / "checkpoint.pt"), texts) < 1e-3


@pytest.mark.parametrize(
    ("kind", "function", "wrong"),
    [
        ("eagle3", "memories._moved", lambda _, part, _distance: part),  # K and V of other chains' rows
        ("eagle3", "losses._after", lambda _, part: part),  # the state at the token itself
        # the context's state at the anchor, which is not known yet
        ("dspark", "losses.BlockMemory", lambda memory, anchors, *rest: memory(anchors + 1, *rest)),
    ],
)
def test_wrong_rows_are_found(
    target: Target, texts: Texts, tmp_path: Path, kind: str, function: str, wrong: Any
) -> None:
    training = training_of(target, texts, kind, tmp_path / "checkpoint.pt")
    module, _, name = f"distill.{function}".rpartition(".")
    with instead(module, name, wrong):
        assert error_of_logits(training, texts) > 1e-2


def error_of_logits(training: Training, texts: Texts) -> float:
    """Largest difference between logits in training and in passes of one chain."""
    batch, kind = TextBatch.of(texts.rows([0]), CPU), training.kind
    trained: list[torch.Tensor] = []
    found = _losses_of(training, batch, trained)
    assert found.acceptance_L.shape == (DEPTH,)
    place = _anchors(batch)[4]
    with torch.no_grad():
        expected = (_chain_logits if kind == "eagle3" else _block_logits)(training.head, batch, place)
    rows = [place + depth if kind == "eagle3" else 4 for depth in range(DEPTH)]
    pairs = zip(trained, rows, expected, strict=True)
    return max(float((logits[row] - one).abs().max()) for logits, row, one in pairs)


def _losses_of(training: Training, batch: TextBatch, recorded: list[torch.Tensor]) -> Losses:
    """Losses, and the logits that they are of."""
    with calls_of(losses, "distillation_loss") as calls, torch.no_grad():
        found = LOSSES[training.kind](training.head, batch, DEPTH, 0.5, torch.Generator().manual_seed(1))
    recorded += [operands[0] for operands, _ in calls]
    return found


def _anchors(batch: TextBatch) -> list[int]:
    """Anchors that `block_losses` draws with the seed 1."""
    step = -(-DEPTH // 2)
    first = 1 + int(torch.randint(step, (), generator=torch.Generator().manual_seed(1)))
    return list(range(first, batch.token_ids_RL.shape[1] - DEPTH + 1, step))


def _chain_logits(head: Any, batch: TextBatch, place: int) -> list[torch.Tensor]:
    """Logits by depth, of a chain of the text's own tokens behind the token at `place`, one row at a time."""
    tokens, taps = batch.token_ids_RL[0], batch.taps_RLX[0]
    rows, logits, state = _Rows(), [], torch.empty(0)
    for index in range(1, place + DEPTH):
        before = head.project(taps[index - 1 : index]) if index <= place else state
        state = head(tokens[index : index + 1], before, torch.tensor([index]), rows)
        if index >= place:
            logits.append(head.logits(state, VOCABULARY)[0])
    return logits


def _block_logits(head: Any, batch: TextBatch, anchor: int) -> list[torch.Tensor]:
    """Logits by depth, of one block, drawn as the engine draws."""
    tokens, taps, rows = batch.token_ids_RL[0], batch.taps_RLX[0], _Rows()
    head.store(head.project(taps[:anchor]), torch.arange(anchor), rows)
    rows.sees_all = True
    block = torch.full((DEPTH,), head.config.mask_token_id)
    block[0] = tokens[anchor]
    state = head.block(block, torch.arange(anchor, anchor + DEPTH), dict.fromkeys((False, True), rows))
    wanted = state[torch.from_numpy(head.rows([DEPTH]))]
    output = HeadOutput(wanted, head.products(wanted))
    sampler, parent, logits = head.sampler(output, [DEPTH], VOCABULARY), None, []
    for depth in range(DEPTH):
        previous = tokens[anchor + depth : anchor + depth + 1]
        logits.append(sampler.below(torch.tensor([depth]), previous, parent)[0])
        parent = torch.tensor([0])
    return logits


class _Rows:
    """A memory of one text: every row sees those before it, and itself; or, of a block, all."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sees_all = False

    def store(self, layer: int, key_THD: torch.Tensor, value_THD: torch.Tensor) -> None:
        if layer in self._kept:
            key, value = self._kept[layer]
            key_THD, value_THD = torch.cat([key, key_THD]), torch.cat([value, value_THD])
        self._kept[layer] = key_THD, value_THD

    def attend(
        self,
        module: Any,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        assert self.sees_all or len(query_THD) == 1
        self.store(module.layer_idx, key_THD, value_THD)
        query, key, value = (part.transpose(0, 1) for part in (query_THD, *self._kept[module.layer_idx]))
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        return ((query @ key.transpose(1, 2) * scaling).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls(target: Target, texts: Texts, tmp_path: Path, kind: str) -> None:
    training = training_of(target, texts, kind, tmp_path / "checkpoint.pt", epochs=12)
    before = training.validate()
    training.run()
    assert sum(training.losses[-4:]) < 0.9 * sum(training.losses[:4])
    assert training.validate()[0] > before[0]


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_ends_with_the_same_weights(target: Target, texts: Texts, tmp_path: Path, kind: str) -> None:
    whole = training_of(target, texts, kind, tmp_path / "whole" / "checkpoint.pt")
    whole.run()
    parts = training_of(target, texts, kind, tmp_path / "parts" / "checkpoint.pt")
    parts.run(most_steps=7)
    parts.save()
    resumed = training_of(target, texts, kind, tmp_path / "parts" / "checkpoint.pt")
    assert resumed.step == 7
    resumed.run()
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[name]), name
    assert whole.losses == resumed.losses


@pytest.mark.parametrize("kind", KINDS)
def test_command_writes_a_head_that_is_served_exactly(
    target_folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one command to a folder in the speculators layout; its greedy answers are plain decoding's."""
    output = tmp_path / "head"
    assert main(options_of(target_folder, output, kind)) == 0
    assert "tokens a pass" in capsys.readouterr().out
    report = json.loads((output / "report.json").read_text())
    assert report["served"]["greedy_answers_equal_plain"] == 1
    assert report["served"]["temperature 1"]["passes"] > 0
    assert report["loss"]["last"] < report["loss"]["first"]
    config = head_config(str(output), None)
    assert config is not None
    assert (config.kind, config.taps, config.max_draft_length) == (kind, TAPS, DEPTH if kind == "dspark" else None)
    loaded = load_head(config, None, load(str(target_folder), None, "auto", CPU).model)
    for name, weight in load_file(output / "model.safetensors").items():
        assert torch.equal(loaded.state_dict()[name], weight.float())
    # The same command again does nothing but measure.
    assert main(options_of(target_folder, output, kind)) == 0
    again = json.loads((output / "report.json").read_text())
    assert again["served"]["temperature 1"] == report["served"]["temperature 1"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--taps", "1,9"), "has 4 layers"),
        (("--tokens", "200"), "raise --tokens"),
        (("--draft-length", "0"), "--draft-length must be above 0"),
        (("--draft-length", "9"), "--length must be at least"),
        (("--tv-weight", "2"), "from 0 to 1"),
        (("--mask-token", "97"), "mask_token_id"),
        (("--prompts", "nowhere.jsonl"), "nor a file that can be read"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    target_folder: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options_of(target_folder, tmp_path / "head", "dspark"), *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_other_settings_do_not_resume(
    target: Target, target_folder: Path, texts: Texts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_of(target, texts, "eagle3", tmp_path / "checkpoint.pt")
    training.run(most_steps=1)
    training.save()
    with pytest.raises(Exception, match="another epochs"):
        training_of(target, texts, "eagle3", tmp_path / "checkpoint.pt", epochs=5)
    words = options_of(target_folder, tmp_path / "head", "eagle3")
    options = parser().parse_args(words)
    texts_folder = Texts(tmp_path / "head" / "texts", sizes_of(options))
    texts_folder.check(settings_of(options, target, shape_of(options, target))["texts"])
    assert main([*words, "--seed", "1"]) == 2
    assert "texts with another seed" in capsys.readouterr().err
