"""Heads that are trained for a tiny random target, and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.heads.loading import head_config, load_head
from engine.start.loading import load
from research.distill import losses
from research.distill.__main__ import complete, main, parser
from research.distill.first_layer import fit_states
from research.distill.heads import new_head
from research.distill.losses import Losses, TextBatch, eagle_losses
from research.distill.memories import ChainMemory
from research.distill.run import settings_of, shape_of
from research.distill.sampling import Sampler, TextPlan
from research.distill.states import States
from research.distill.target import Target
from research.distill.texts import SAMPLED, Texts, places_of
from research.distill.training import Training, TrainingPlan
from tests.engine import tiny
from tests.wrong import calls_of, instead

VOCABULARY, LENGTH, DEPTH, SMALL = 97, 24, 3, 40
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
def sampler(target_folder: Path) -> Sampler:
    loaded = load(str(target_folder), None, "auto", CPU)
    return Sampler(tiny.build(loaded, None), None, TextPlan(LENGTH, LENGTH, (1.0,), 3))


@pytest.fixture(scope="module")
def texts(sampler: Sampler, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    texts = Texts(tmp_path_factory.mktemp("texts"), 16)
    for number in range(2):
        prompts = [(1,), (5, 6, 7)] * 8
        texts.add(SAMPLED, number, sampler.continued(prompts, 16 * number))
    return texts


@pytest.fixture(scope="module")
def states(target: Target, texts: Texts) -> States:
    states = States(texts.folder, TAPS)
    states.compute(target, texts.files(1e6))
    return states


def options_of(target: Path, output: Path, *more: str) -> Any:
    words = ["--output", str(output), "--taps", "1,2,4", "--draft-length", str(DEPTH), "--threads", "1"]
    words += ["--length", str(LENGTH), "--sample-batch", "8", "--tokens", "800", "--epochs", "4", "--batch", "4"]
    return [str(target), *words, "--learning-rate", "0.01", *more]


def training_of(target: Target, states: States, file: Path, epochs: int = 4, is_fitted: bool = True) -> Training:
    options = parser().parse_args(options_of(Path(target.name), file.parent))
    complete(options)
    shape = shape_of(options, target)
    schedule = TrainingPlan(epochs, 4, 0.01, DEPTH, 0.5, 0)
    places = places_of(Texts(states.folder.parent, 16).files(1e6))
    fit = fit_states(states.rows(places), target.weights.embedding_VD) if is_fitted else None
    head = new_head(shape, target, seed=0, fit=fit)
    settings = settings_of(options, target, shape) | {"epochs": epochs}
    return Training(head, states, places, schedule, settings, file)


def rows_of(states: States, *numbers: int) -> Any:
    places = places_of(Texts(states.folder.parent, 16).files(1e6))
    return states.rows([places[number] for number in numbers])


def test_states_are_those_of_a_pass_over_the_text(target: Target, states: States) -> None:
    """States of texts that were computed together."""
    rows = rows_of(states, 3)
    seen = target.observe(rows.token_ids_RL.long())
    for stored, state in ((rows.taps_RLX, seen.taps_BTX), (rows.last_RLD, seen.last_BTD)):
        assert (stored.float() - state.float()).abs().max() < 0.05 * state.float().abs().max()


def test_texts_depend_on_seed_and_number_alone(sampler: Sampler) -> None:
    together = sampler.continued([(1,)] * 4, 10)
    alone = sampler.continued([(1,)], 12)
    assert together[2] == alone[0]
    assert len({tuple(text.token_ids) for text in together}) == 4


@pytest.mark.slow
def test_texts_follow_the_targets_distribution(target: Target, sampler: Sampler) -> None:
    drawn = Sampler(sampler._engine, None, TextPlan(2, 2, (1.0,), 3)).continued([(1,)] * 4000, 0)
    counts = torch.bincount(torch.tensor([text.token_ids[1] for text in drawn]), minlength=VOCABULARY) / 4000
    expected = target.observe(torch.tensor([[1]])).logits_BV[0].softmax(-1)
    assert (counts - expected).abs().sum() < 0.12
    hotter = (target.observe(torch.tensor([[1]])).logits_BV[0] / 2).softmax(-1)
    assert (counts - hotter).abs().sum() > 0.12


def test_losses_are_of_the_logits_that_are_served(target: Target, states: States, tmp_path: Path) -> None:
    """At every depth below a text, against passes that know nothing of training."""
    assert error_of_logits(training_of(target, states, tmp_path / "checkpoint.pt")) < 1e-3


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        # K and V of other chains' rows.
        ("memories._moved", lambda _, part, _distance: part),
        ("losses._after", lambda _, part: part),  # the state at the token itself
    ],
)
def test_wrong_rows_are_found(target: Target, states: States, tmp_path: Path, function: str, wrong: Any) -> None:
    training = training_of(target, states, tmp_path / "checkpoint.pt")
    module, _, name = f"research.distill.{function}".rpartition(".")
    with instead(module, name, wrong):
        assert error_of_logits(training) > 1e-2


def error_of_logits(training: Training) -> float:
    """Largest difference between logits in training and in passes of one chain."""
    batch, place = TextBatch.of(rows_of(training.states, 0), CPU), 9
    trained: list[torch.Tensor] = []
    measured = _losses_of(training, batch, trained)
    assert measured.acceptance_L.shape == (DEPTH,)
    with torch.no_grad():
        expected = _chain_logits(training.head, batch, place)
    # Rows without a whole chain are left out.
    pairs = zip(trained, expected, strict=True)
    return max(float((logits[place - 1] - one).abs().max()) for logits, one in pairs)


def _losses_of(training: Training, batch: TextBatch, recorded: list[torch.Tensor]) -> Losses:
    """Losses, and the logits that they are of."""
    with calls_of(losses, "distillation_loss") as calls, torch.no_grad():
        result = eagle_losses(training.head, batch, DEPTH, 0.5)
    recorded += [operands[0] for operands, _ in calls]
    return result


def _chain_logits(head: Any, batch: TextBatch, place: int) -> list[torch.Tensor]:
    """Return logits by depth, one row at a time.

    Of a chain of the text's own tokens behind the token at `place`.
    """
    tokens, taps = batch.token_ids_RL[0], batch.taps_RLX[0]
    rows, logits, state = _Rows(), [], torch.empty(0)
    for index in range(1, place + DEPTH):
        before = head.project(taps[index - 1 : index]) if index <= place else state
        state = head(tokens[index : index + 1], before, torch.tensor([index]), rows)
        if index >= place:
            logits.append(head.logits(state, VOCABULARY)[0])
    return logits


def test_texts_of_a_step_do_not_change_each_other(target: Target, states: States, tmp_path: Path) -> None:
    """Losses of a long and a short text together are the weighted losses of each alone.

    The weights are the numbers of their rows.
    """
    assert error_of_filling(training_of(target, states, tmp_path / "checkpoint.pt")) < 1e-4


def test_rows_after_a_text_s_end_are_found(target: Target, states: States, tmp_path: Path) -> None:
    training = training_of(target, states, tmp_path / "checkpoint.pt")

    def marked(filled: Any, parts: Any, length: int) -> Any:
        return (
            filled([torch.ones(length, dtype=torch.bool)] * len(parts), length)
            if _is_mark(parts)
            else filled(parts, length)
        )

    with instead("research.distill.states", "_filled", marked):
        assert error_of_filling(training) > 1e-2


def _is_mark(parts: Any) -> bool:
    return bool(parts[0].dtype == torch.bool)


def error_of_filling(training: Training) -> float:
    """Largest difference between sums over rows of texts together and alone, by depth."""
    place = training.places[0]
    short = place._replace(first=place.first + place.length, length=15)
    sums = []
    for places in ([place, short], [place], [short]):
        batch = TextBatch.of(training.states.rows(places), CPU)
        student: list[Any] = []
        measured = _losses_of(training, batch, student)
        sums.append(torch.stack([len(rows) * one for rows, one in zip(student, measured.acceptance_L, strict=True)]))
    return float((sums[0] - sums[1] - sums[2]).abs().max())


class _Rows:
    """A memory of one text: every row sees those before it, and itself."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        assert len(query_THD) == 1
        self.store(module.layer_idx, key_THD, value_THD)
        query, key, value = (part.transpose(0, 1) for part in (query_THD, *self._kept[module.layer_idx]))
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        return ((query @ key.transpose(1, 2) * scaling).softmax(-1) @ value).transpose(0, 1)


def test_a_first_layer_predicts_linearly(
    target: Target, states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE-3 head's first weights are the solution of least squares.

    If its rows attend to themselves alone.
    """
    monkeypatch.setattr("research.distill.first_layer._SELF_ATTENTION", 1000.0)
    training = training_of(target, states, tmp_path / "checkpoint.pt")
    head, rows = training.head, rows_of(states, 0)
    fit = fit_states(states.rows(training.places), target.weights.embedding_VD)
    width = len(fit.constant_D)
    before, after = (rows.taps_RLX[0, part, -width:].float() for part in (slice(0, -1), slice(1, None)))
    before = before / before.square().mean(-1, keepdim=True).sqrt()
    after = after / after.square().mean(-1, keepdim=True).sqrt()
    embedded = target.weights.embedding_VD[rows.token_ids_RL[0, 1:].long()]
    embedded = embedded / embedded.square().mean(-1, keepdim=True).sqrt()
    predicted = before @ fit.state_weight_DD.T + embedded @ fit.embedding_weight_DD.T + fit.constant_D
    positions, tokens = torch.arange(1, LENGTH), rows.token_ids_RL[0, 1:].long()
    with torch.no_grad():
        memory = ChainMemory(1)
        drafted_ND = head(tokens, head.project(rows.taps_RLX[0, :-1].float()), positions, memory)
    assert (drafted_ND - predicted).abs().max() < 0.01 * predicted.abs().max()
    assert (predicted - after).square().mean() < 0.9 * after.square().mean()


@pytest.mark.slow
def test_loss_falls(target: Target, states: States, tmp_path: Path) -> None:
    training = training_of(target, states, tmp_path / "checkpoint.pt", epochs=12, is_fitted=False)
    before = training.validate()
    training.run()
    assert sum(training.losses[-4:]) < 0.9 * sum(training.losses[:4])
    assert training.validate()[0] > before[0]


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_weights(target: Target, states: States, tmp_path: Path) -> None:
    whole = training_of(target, states, tmp_path / "whole" / "checkpoint.pt")
    whole.run()
    parts = training_of(target, states, tmp_path / "parts" / "checkpoint.pt")
    parts.run(most_steps=7)
    parts.save()
    resumed = training_of(target, states, tmp_path / "parts" / "checkpoint.pt")
    assert resumed.step == 7
    resumed.run()
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[name]), name
    assert whole.losses == resumed.losses


@pytest.mark.sole("distilling a head")
@pytest.mark.sampled
@pytest.mark.parametrize("vocabulary", [VOCABULARY, SMALL])
def test_command_writes_a_head_that_is_served_exactly(
    target_folder: Path, tmp_path: Path, vocabulary: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one command to a folder in the speculators layout.

    Its greedy answers are plain decoding's.
    """
    output, small = tmp_path / "head", ("--draft-vocabulary", str(vocabulary))
    assert main(options_of(target_folder, output, *small)) == 0
    assert "tokens a pass" in capsys.readouterr().out
    report = json.loads((output / "report.json").read_text())
    assert report["served"]["greedy_answers_equal_plain"] == 1
    assert report["served"]["temperature 1"]["passes"] > 0
    assert report["loss"]["last"] < report["loss"]["first"]
    config = head_config(str(output), None)
    assert config is not None
    assert (config.kind, config.taps, config.max_draft_length) == ("eagle3", TAPS, None)
    loaded = load_head(config, None, load(str(target_folder), None, "auto", CPU).model)
    for name, weight in load_file(output / "model.safetensors").items():
        assert torch.equal(loaded.state_dict()[name].float(), weight.float())
    assert (config.draft_vocab_size, loaded.d2t is None) == (vocabulary, vocabulary == VOCABULARY)
    assert (report["covered_probability"] == 1) == (vocabulary == VOCABULARY)
    # The same command again does nothing but measure.
    assert main(options_of(target_folder, output, *small)) == 0
    again = json.loads((output / "report.json").read_text())
    assert again["served"]["temperature 1"] == report["served"]["temperature 1"]


@pytest.mark.slow
def test_an_earlier_head_is_trained_further(target_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """It keeps its tokens, and begins at the acceptance that it had.

    A head of another size is refused.
    """
    small = ("--draft-vocabulary", str(SMALL), "--texts", str(tmp_path / "texts"))
    assert main(options_of(target_folder, tmp_path / "first", *small)) == 0
    further = [*small, "--begin-from", str(tmp_path / "first"), "--learning-rate", "1e-9"]
    assert main(options_of(target_folder, tmp_path / "second", *further)) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
    more = ["--layers", "2", *further]
    assert main(options_of(target_folder, tmp_path / "third", *more)) == 2
    assert "a head of another type or size" in capsys.readouterr().err
    nothing = ["--begin-from", str(tmp_path / "texts")]
    assert main(options_of(target_folder, tmp_path / "fourth", *nothing)) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--taps", "1,9"), "has 4 layers"),
        (("--tokens", "200"), "raise --tokens"),
        (("--hours", "0.0001"), "raise --tokens or --hours"),
        (("--draft-length", "0"), "--draft-length must be above 0"),
        (("--draft-length", "9"), "--length must be at least"),
        (("--tv-weight", "2"), "from 0 to 1"),
        (("--prompts", "nowhere.jsonl"), "not a file that can be read"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    target_folder: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options_of(target_folder, tmp_path / "head"), *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_other_settings_do_not_resume(
    target: Target, target_folder: Path, states: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_of(target, states, tmp_path / "checkpoint.pt")
    training.run(most_steps=1)
    training.save()
    with pytest.raises(Exception, match="another epochs"):
        training_of(target, states, tmp_path / "checkpoint.pt", epochs=5)
    words = options_of(target_folder, tmp_path / "head")
    options = parser().parse_args(words)
    complete(options)
    settings = settings_of(options, target, shape_of(options, target))
    Texts(tmp_path / "head" / "texts", 8).check(settings["texts"])
    assert main([*words, "--seed", "1"]) == 2
    assert "texts with another seed" in capsys.readouterr().err
