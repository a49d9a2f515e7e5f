"""One run of `polydraft distill`: sample, compute states, train, save, measure."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from engine.config import SchedulerConfig
from engine.errors import ConfigError
from engine.heads.head import Head
from engine.start.number_formats import choose_device
from research.analysis.loading import config_of, load_engine
from research.distill.budget import Amount, Present, Speeds, estimate, fitting, to_dict
from research.distill.dialogues import ChatTokens, FileDialogue, LearnedText, read_dialogues, read_records
from research.distill.first_layer import fit_states
from research.distill.heads import (
    KIND,
    WEIGHTS,
    HeadShape,
    checked_config,
    choose_tokens,
    draft_vocab_size,
    new_head,
    read_weights,
    save_head,
    take_weights,
    tokens_of,
    write_config,
)
from research.distill.report import NUM_TOKENS, TEMPERATURES, read_report_prompts, served_acceptance
from research.distill.sampling import Sampler, TextPlan
from research.distill.states import States
from research.distill.target import Target
from research.distill.texts import SAMPLED, TextPlace, Texts, first_texts, learned_counts, num_tokens_of, places_of
from research.distill.training import NUM_CHECKPOINTS, NUM_VALIDATION, Training, TrainingPlan

_AT_ONCE = 16
"""Requests that are sampled at once: on a CPU more of them are no faster."""
_MEASURED_TEXTS, _MEASURED_STEPS = 8, 3
_FITTED_TEXTS = 256
"""Texts from which the first weights of an EAGLE-3 head are computed."""


class Run:
    """A run with some options; an interrupted run with the same options goes on."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the target; raise ConfigError or LoadError for what cannot be trained."""
        self._began = time.monotonic()
        self._options, device = options, choose_device(options.device)
        self._target = Target(options.folder, options.revision, options.taps, device)
        self._shape = shape_of(options, self._target)
        checked_config(self._shape, self._target)
        self._output = options.output or Path(f"{Path(options.target).name}-{KIND}")
        self._texts = Texts(options.texts or self._output / "texts", options.sample_batch)
        self._states = States(self._texts.folder, self._target.taps)
        self._prompts = None if options.prompts is None else read_dialogues(options.prompts)
        if self._prompts is None and self._target.config.bos_token_id is None:
            raise ConfigError(f"{options.target} has no begin token to sample from; name prompts by --prompts")
        self._settings = settings_of(options, self._target, self._shape)
        self._texts.check(self._settings["texts"])

    def carry_out(self) -> dict[str, Any]:
        """Run all parts; return the report."""
        sampler, start_s = self._sampler()
        self._give(sampler)
        amount, planned = self._plan(sampler, start_s)
        self._sample(sampler, amount.num_tokens)
        del sampler
        files = self._texts.files(amount.num_tokens)
        self._states.compute(self._target, files)
        config, training = write_config(self._shape, self._target), self._training(files, amount)
        del self._target
        training.run()
        save_head(training.head, config, self._output)
        trained_s = self._passed_s()
        report = {
            **self._settings,
            **asdict(amount),
            "parameters": sum(one.numel() for one in training.head.parameters() if one.requires_grad),
            "covered_probability": training.coverage(),
            **planned,
            "seconds_of_the_last_run": {"before_the_report": trained_s},
            "loss": {"first": training.losses[0], "last": training.losses[-1]},
            "validation": training.validations,
            "served": self._measured(training),
        }
        report["seconds_of_the_last_run"]["all"] = self._passed_s()
        (self._output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
        return report

    def _passed_s(self) -> int:
        return round(time.monotonic() - self._began)

    def _sampler(self) -> tuple[Sampler, float]:
        """Return the engine that samples, and the seconds that its start took."""
        options, began = self._options, time.monotonic()
        pair = argparse.Namespace(
            target=options.folder, draft=None, dtype="auto", device=options.device, threads=options.threads
        )
        engine = load_engine(config_of(pair, SchedulerConfig(max_num_seqs=_AT_ONCE), needs_draft=False))
        chat = None
        if self._prompts is not None or options.texts_from is not None:
            chat = ChatTokens(options.folder, engine.facts.eos_token_ids)
        plan = TextPlan(options.length, options.answer_tokens, options.temperatures, options.seed)
        return Sampler(engine, chat, plan), time.monotonic() - began

    def _give(self, sampler: Sampler) -> None:
        """Store the whole texts of `--texts-from`, once."""
        given = self._options.texts_from
        if given is not None and not self._texts.num_given():
            self._texts.give(sampler.given(dialogue) for dialogue in read_dialogues(given))

    def _sample(self, sampler: Sampler, num_tokens: int) -> None:
        """Sample the texts that are missing."""
        with tqdm(total=num_tokens, desc="sample", unit="token", unit_scale=True) as bar:
            sampler.progress = bar.update
            self._texts.sample(lambda number: self._sampled(sampler, number), num_tokens, bar)

    def _sampled(self, sampler: Sampler, number: int) -> Sequence[LearnedText]:
        """Sample a batch of texts."""
        size = self._options.sample_batch
        first = number * size
        if self._prompts is None:
            return sampler.continued([(int(self._target.config.bos_token_id),)] * size, first)
        return sampler.sampled([self._prompt(text) for text in range(first, first + size)], first)

    def _prompt(self, number: int) -> FileDialogue:
        """Return the prompt of a text: every time through the file it has another order."""
        assert self._prompts is not None
        epoch, place = divmod(number, len(self._prompts))
        order = np.random.default_rng((self._options.seed, epoch)).permutation(len(self._prompts))
        return self._prompts[int(order[place])]

    def _plan(self, sampler: Sampler, start_s: float) -> tuple[Amount, dict[str, Any]]:
        """Return how much is trained on, and what was estimated.

        An interrupted run has stored both.
        """
        options, file = self._options, self._output / "plan.json"
        asked = {name: getattr(options, name) for name in ("hours", "tokens", "epochs")}
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf8"))
            if stored["asked"] == asked:
                return Amount(**stored["amount"]), stored["planned"]
        speeds, present = self._speeds(sampler, start_s), self._present()
        amount = Amount(int(options.tokens), options.epochs or 2)
        if options.hours is not None:
            left_s = 3600 * options.hours - (time.monotonic() - self._began)
            amount = fitting(left_s, speeds, present, NUM_CHECKPOINTS)
        if amount.num_tokens < (NUM_VALIDATION + options.batch) * options.length / 2:
            raise ConfigError(f"{amount.num_tokens} tokens are too few; raise --tokens or --hours")
        estimated = estimate(amount, speeds, present, NUM_CHECKPOINTS)
        said = f"{amount.num_tokens:,} tokens of text, {amount.epochs} epochs; {estimated} from now on"
        tqdm.write(said, file=sys.stderr)
        planned = to_dict(speeds, estimated) | {"before_the_estimate_s": self._passed_s()}
        self._output.mkdir(parents=True, exist_ok=True)
        stored = {"asked": asked, "amount": asdict(amount), "planned": planned}
        file.write_text(json.dumps(stored) + "\n", encoding="utf8")
        return amount, planned

    def _present(self) -> Present:
        """Return what earlier runs have left."""
        sampled = list(self._texts.folder.glob(f"{SAMPLED}-*.safetensors"))
        with_states = [file for file in self._texts.files(float("inf")) if self._states.file(file).exists()]
        return Present(self._texts.num_given(), sum(map(num_tokens_of, sampled)), sum(map(num_tokens_of, with_states)))

    def _speeds(self, sampler: Sampler, start_s: float) -> Speeds:
        """Measure the speeds on the first batch that is missing, which the run then uses."""
        files, options = self._texts.files(float("inf")), self._options
        has_all = options.hours is None and sum(map(num_tokens_of, files)) >= options.tokens
        sampling = float("inf") if has_all else self._speed_of_sampling(sampler)
        with tempfile.TemporaryDirectory() as name:
            few = Texts(Path(name), _MEASURED_TEXTS)
            few.add(SAMPLED, 0, first_texts(self._texts.file(SAMPLED, 0), _MEASURED_TEXTS))
            return self._speeds_of_training(few, sampling, start_s)

    def _speed_of_sampling(self, sampler: Sampler) -> float:
        number = next(one for one in count() if not self._texts.file(SAMPLED, one).exists())
        with tqdm(desc="measure the speed of sampling", unit="token") as bar:
            sampler.progress = bar.update
            began = time.monotonic()
            texts = self._sampled(sampler, number)
        speed = sum(len(text.token_ids) for text in texts) / (time.monotonic() - began)
        self._texts.add(SAMPLED, number, texts)
        return speed

    def _speeds_of_training(self, texts: Texts, sampling: float, start_s: float) -> Speeds:
        """Measure states, steps and a validation, on few texts again and again."""
        options, files = self._options, texts.files(1)
        states, began = States(texts.folder, self._target.taps), time.monotonic()
        states.compute(self._target, files)
        states_s = time.monotonic() - began
        places = places_of(files)
        num_tokens = sum(place.length for place in places)
        needed = NUM_VALIDATION + options.batch * (1 + _MEASURED_STEPS)
        repeated = (places * -(-needed // len(places)))[:needed]
        training = self._training_on(files, states, repeated, 1, texts.folder / "checkpoint.pt")
        training.train_for(1)
        began = time.monotonic()
        training.validate()
        checkpoint_s, began = time.monotonic() - began, time.monotonic()
        training.train_for(_MEASURED_STEPS)
        step_s = (time.monotonic() - began) / _MEASURED_STEPS
        tokens_per_step = options.batch * num_tokens / len(places)
        report_s = start_s + self._report_tokens() / sampling
        trained_per_s = tokens_per_step / step_s
        return Speeds(sampling, num_tokens / states_s, trained_per_s, report_s, checkpoint_s)

    def _report_tokens(self) -> int:
        """Return the number of tokens that the report reads and samples, about."""
        options = self._options
        num_prompts = NUM_VALIDATION if options.report_prompts is None else len(read_records(options.report_prompts))
        num_runs = len(TEMPERATURES) + 1
        return num_prompts * (num_runs * NUM_TOKENS + int(options.length) // 2)

    def _training(self, files: Sequence[Path], amount: Amount) -> Training:
        """Return the training on texts, continued if it was interrupted."""
        file = self._output / "checkpoint.pt"
        return self._training_on(files, self._states, places_of(files), amount.epochs, file)

    def _training_on(
        self, files: Sequence[Path], states: States, places: Sequence[TextPlace], epochs: int, file: Path
    ) -> Training:
        options, target = self._options, self._target
        earlier = None if options.begin_from is None else read_weights(options.begin_from)
        counts = learned_counts(files, target.config.vocab_size)
        tokens = choose_tokens(counts, self._shape.draft_vocab_size) if earlier is None else tokens_of(earlier)
        fit = None
        if earlier is None and target.taps[-1] == target.config.num_hidden_layers:
            fit = fit_states(states.rows(places[NUM_VALIDATION:][:_FITTED_TEXTS]), target.weights.embedding_VD.cpu())
        head: Head = new_head(self._shape, target, options.seed, tokens, fit)
        if earlier is not None:
            take_weights(head, earlier, options.begin_from)
        plan = TrainingPlan(
            epochs, options.batch, options.learning_rate, options.draft_length, options.tv_weight, options.seed
        )
        settings = self._settings | {"epochs": epochs, "texts": [self._settings["texts"], len(places)]}
        return Training(head, states, places, plan, settings, file)

    def _measured(self, training: Training) -> dict[str, Any]:
        """Return the acceptance by the engine, on prompts that were not trained on."""
        options = self._options
        if options.report_prompts is not None:
            prompts = read_report_prompts(options.report_prompts, options.folder, options.length)
        else:
            prompts = {"held-out texts": training.held_out_prompts()}
        pair = argparse.Namespace(
            target=options.folder,
            draft=str(self._output),
            dtype="auto",
            draft_weights=options.draft_weights,
            device=options.device,
            threads=options.threads,
        )
        return served_acceptance(pair, prompts, options.draft_length, NUM_TOKENS)


def shape_of(options: argparse.Namespace, target: Target) -> HeadShape:
    """Size of the head."""
    config = target.config
    vocabulary = draft_vocab_size(options.draft_vocabulary, int(config.vocab_size))
    return HeadShape(options.layers, options.draft_length, vocabulary)


def settings_of(options: argparse.Namespace, target: Target, shape: HeadShape) -> dict[str, Any]:
    """All that the result depends on, but the numbers of tokens and epochs."""
    texts = {
        "target": Path(options.target).name,
        "revision": options.revision,
        "length": options.length,
        "answer_tokens": options.answer_tokens,
        "temperatures": list(options.temperatures),
        "sample_batch": options.sample_batch,
        "prompts": _digest(options.prompts),
        "texts_from": _digest(options.texts_from),
        "seed": options.seed,
    }
    names = ("batch", "learning_rate", "tv_weight", "seed")
    earlier = options.begin_from
    return {
        "begin_from": None if earlier is None else _digest(earlier / WEIGHTS),
        "head": asdict(shape),
        "taps": list(target.taps),
        "texts": texts,
        **{name: getattr(options, name) for name in names},
    }


def _digest(file: Path | None) -> str | None:
    """Return a file's name and a digest of what is in it."""
    if file is None:
        return None
    try:
        return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        raise ConfigError(f"{file}: not a file that can be read: {error}") from error
