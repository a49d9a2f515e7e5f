"""Train the embedded model pair on public text: ``python -m research.demo.train --help``.

Four stages, each of which can be run alone with ``--stages``:

prepare   train the tokenizer, tokenize the text, set the held-out part aside target    train the
target model on the training text draft     distil the draft model from the target, on training text
and on text sampled from the target evaluate  measure both on held-out text; write
``evaluation.json`` and ``MODEL_CARD.md``

This exists so that the weights next to it can be rebuilt and checked. It is not a general trainer:
the model shapes are fixed in ``modeling.py`` and the sources in ``data.py``. The lengths of the two
training stages are given in steps and, as an upper limit, in minutes; whichever comes first ends
the learning-rate schedule.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from research.demo import evaluate
from research.demo.data import BOS, DIALOGUE_SOURCES, ROLE_TOKENS, Corpus, prepare
from research.demo.modeling import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    add_dropout,
    build_model,
    compile_layers,
    load_model,
    load_tokenizer,
    read_json,
    save_model,
    write_json,
)
from research.distill.training import autocast, build_optimizer

STAGES = ("prepare", "target", "draft", "evaluate")
VALIDATION_ROWS = 16


@dataclass(frozen=True)
class Schedule:
    """Length, batch and learning rate of one training stage."""

    steps: int
    minutes: float
    batch_rows: int
    row_length: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    dialogue_repeats: int
    seed: int


class Progress:
    """Progress of a stage, from 0 to 1, by steps or by the clock, whichever is ahead."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.step, self.start = schedule, 0, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def fraction(self) -> float:
        return max(self.step / self.schedule.steps, self.seconds / (60 * self.schedule.minutes))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to one hundredth of the peak."""
        warmup = min(1.0, (self.step + 1) / max(1, self.schedule.warmup_steps))
        cosine = 0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * min(1.0, self.fraction)))
        return float(self.schedule.learning_rate * min(warmup, cosine))


def packed_batches(corpus: Corpus, schedule: Schedule, device: torch.device) -> Iterator[Tensor]:
    """Endless batches of packed rows, reshuffled on every pass.

    Dialogues come ``dialogue_repeats`` times.

    Raises ValueError where the text does not fill one batch.
    """
    generator = np.random.default_rng(schedule.seed)
    present = [str(source) for source in np.unique(corpus.sources)]
    repeats = {s: 1 if s == "gutenberg" else schedule.dialogue_repeats for s in present}
    while True:
        rows = torch.from_numpy(corpus.pack(repeats, schedule.row_length + 1, generator)).to(device)
        if len(rows) < schedule.batch_rows:
            raise ValueError(
                f"a batch has {schedule.batch_rows} rows of {schedule.row_length} tokens, and the text fills "
                f"{len(rows)}: train on more text"
            )
        for start in range(0, len(rows) - schedule.batch_rows + 1, schedule.batch_rows):
            yield rows[start : start + schedule.batch_rows].long()


def optimize(
    model: LlamaForCausalLM,
    batches: Iterator[Tensor],
    schedule: Schedule,
    loss_of: Callable[[Tensor, float], Tensor],
    validate: Callable[[], dict[str, float]],
    title: str,
) -> dict[str, object]:
    """Train until the schedule ends; ``loss_of`` maps a batch and the progress to a loss."""
    optimizer = build_optimizer(model, schedule.learning_rate, schedule.weight_decay)
    progress = Progress(schedule)
    validation: list[dict[str, float]] = []
    interval = 0.5 if sys.stderr.isatty() else 20.0
    bar = tqdm(total=schedule.steps, desc=title, unit="step", mininterval=interval)
    while progress.fraction < 1.0:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = progress.learning_rate()
        loss = loss_of(next(batches), progress.fraction)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        bar.update()
        if progress.step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if progress.fraction * 8 >= len(validation) + 1 or progress.fraction >= 1.0:
            model.eval()
            validation.append({"step": progress.step, "loss": loss.item(), **validate()})
            tqdm.write(f"{title} {progress.seconds:.0f} s {validation[-1]}", file=sys.stderr)
    bar.close()
    device = next(model.parameters()).device
    return {
        **asdict(schedule),
        "steps": progress.step,
        "tokens": progress.step * schedule.batch_rows * schedule.row_length,
        "seconds": round(progress.seconds, 1),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "validation": validation,
    }


def validation_rows(work_dir: Path, row_length: int, device: torch.device) -> dict[str, Tensor]:
    """One fixed batch of held-out rows for each of three sources."""
    heldout, rows = Corpus.load(work_dir / "heldout.npz"), {}
    for source in ("sgd", "persona", "gutenberg"):
        packed = heldout.pack({source: 1}, row_length + 1, np.random.default_rng(0))
        rows[source] = torch.from_numpy(packed[:VALIDATION_ROWS]).to(device).long()
    return rows


def record_run(path: Path, facts: dict[str, object], resumed: bool) -> None:
    """Write the facts of a training run, after those of the runs it resumed from."""
    earlier = read_json(path).get("runs", []) if resumed else []
    write_json(path, {"runs": [*earlier, facts]})


def train_target(args: argparse.Namespace, schedule: Schedule, device: torch.device) -> None:
    """Train the target with next-token cross-entropy on all tokens."""
    tokenizer = load_tokenizer(args.work / "tokenizer")
    corpus = Corpus.load(args.work / "train.npz")
    model = build_model("target", tokenizer).to(device)
    if args.resume:
        model.load_state_dict(load_model(args.out / "target", device).state_dict())
    add_dropout(model, args.dropout)
    if device.type == "cuda":
        compile_layers(model)
    heldout = validation_rows(args.work, schedule.row_length, device)

    def cross_entropy(rows: Tensor, _progress: float = 0.0) -> Tensor:
        with autocast(device):
            logits = model(rows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def validate() -> dict[str, float]:
        return {source: round(cross_entropy(rows).item(), 4) for source, rows in heldout.items()}

    batches = packed_batches(corpus, schedule, device)
    facts = optimize(model, batches, schedule, cross_entropy, validate, "train target")
    save_model(model, args.work / "tokenizer", args.out / "target")
    record_run(args.work / "target_training.json", {**facts, "dropout": args.dropout}, args.resume)


def _logits(target: LlamaForCausalLM, cache: DynamicCache, token_ids_BN: Tensor) -> Tensor:
    logits: Tensor = target(token_ids_BN, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
    return logits


@torch.no_grad()
def sample_corpus(
    target: LlamaForCausalLM, corpus: Corpus, tokens: int, batch_rows: int, row_length: int, seed: int
) -> Corpus:
    """Text sampled from the target at temperature 1, started by prefixes of training documents."""
    generator = np.random.default_rng(seed)
    device = next(target.parameters()).device
    draws = torch.Generator(device).manual_seed(seed)
    rows: list[Tensor] = []
    with tqdm(total=tokens, desc="sample from target", unit="token", mininterval=5.0) as bar:
        while len(rows) * batch_rows * row_length < tokens:
            prefix = int(generator.choice([8, 24, 48, 96]))
            long_enough = np.flatnonzero(np.diff(corpus.offsets) >= prefix)
            weights = np.where(np.isin(corpus.sources[long_enough], DIALOGUE_SOURCES), 1.0, 0.7)
            chosen = generator.choice(long_enough, batch_rows, p=weights / weights.sum())
            prompts = [corpus.document(index)[:prefix].tolist() for index in chosen]
            with autocast(device):
                sampled = continued(
                    partial(_logits, target, DynamicCache(config=target.config)), prompts, row_length, draws
                )
            rows.append(sampled.cpu())
            bar.update(sampled.numel())
    flat = torch.cat(rows).numpy().astype(np.uint16)
    offsets = np.arange(len(flat) + 1, dtype=np.int64) * row_length
    return Corpus(flat.ravel(), offsets, np.full(len(flat), "sampled"))


def continued(
    logits_of: Callable[[Tensor], Tensor], prompts: Sequence[Sequence[int]], length: int, generator: torch.Generator
) -> Tensor:
    """Sample texts at temperature 1: [B, length] tokens.

    Through end tokens: a new turn or text follows one.

    logits_of: takes the next tokens [B, N] of all texts, each once, and returns logits [B, V] after
    the last of them.
    """
    known_BT = torch.full((len(prompts), length), -1)
    for row, prompt in enumerate(prompts):
        kept = torch.tensor(prompt[: length - 1])
        known_BT[row, : len(kept)] = kept
    known_BT = known_BT.to(generator.device)
    token_ids_BN = known_BT[:, : min(length - 1, *map(len, prompts))]
    fed, position = [], 0
    while True:
        logits_BV = logits_of(token_ids_BN)
        fed.append(token_ids_BN)
        position += token_ids_BN.shape[1]
        if position == length:
            return torch.cat(fed, 1)
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(1)
        known_B = known_BT[:, position]
        token_ids_BN = torch.where(known_B >= 0, known_B, drawn_B).unsqueeze(1)


def distillation_loss(student: Tensor, teacher: Tensor, weights: Tensor, tv_weight: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || draft) mixed with the total variation distance.

    Also the mean acceptance, 1 - TV.

    The total variation is one minus the probability that speculative sampling accepts a drafted
    token. The share of KL that always stays keeps some mass on the target's less likely tokens.
    """
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    p = log_p.exp()
    weights = weights / weights.sum()
    divergence = ((p * (log_p - log_q)).sum(-1) * weights).sum()
    variation = (0.5 * (p - log_q.exp()).abs().sum(-1) * weights).sum()
    return (1 - tv_weight) * divergence + tv_weight * variation, 1 - variation


def position_weights(inputs: Tensor, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> Tensor:
    """1 where the next token belongs to an assistant turn or to prose, ``prompt_weight`` elsewhere.

    User and system turns are prompts when serving: the draft conditions on them but never drafts
    them.
    """
    starts = tokenizer.convert_tokens_to_ids([BOS, *ROLE_TOKENS.values()])
    prompts = tokenizer.convert_tokens_to_ids([ROLE_TOKENS["system"], ROLE_TOKENS["user"]])
    is_start = torch.isin(inputs, torch.tensor(starts, device=inputs.device))
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    latest = torch.where(is_start, positions, 0).cummax(dim=1).values
    in_prompt = torch.isin(inputs.gather(1, latest), torch.tensor(prompts, device=inputs.device))
    return torch.where(in_prompt, prompt_weight, 1.0)


def train_draft(args: argparse.Namespace, schedule: Schedule, device: torch.device) -> None:
    """Distil the draft from the saved target."""
    tokenizer = load_tokenizer(args.work / "tokenizer")
    corpus = Corpus.load(args.work / "train.npz")
    sampler = load_model(args.out / "target", device, attention="sdpa")
    sampled = sample_corpus(sampler, corpus, args.sample_tokens, args.sample_rows, args.sample_length, args.seed)
    teacher = load_model(args.out / "target", device)
    student = build_model("draft", tokenizer).to(device)
    if args.resume:
        student.load_state_dict(load_model(args.out / "draft", device).state_dict())
    loss_function = distillation_loss
    if device.type == "cuda":
        compile_layers(teacher)
        compile_layers(student)
        loss_function = torch.compile(distillation_loss, dynamic=False)
    heldout = validation_rows(args.work, schedule.row_length, device)

    def losses(rows: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        ramp = 1.0 if args.resume else min(1.0, max(0.0, (progress - 0.1) / 0.3))
        share = torch.tensor(args.tv_weight * ramp, device=device)
        weights = position_weights(rows[:, :-1], tokenizer, args.prompt_weight)
        with autocast(device):
            with torch.no_grad():
                teacher_logits = teacher(rows[:, :-1], use_cache=False).logits
            student_logits = student(rows[:, :-1], use_cache=False).logits
        return loss_function(student_logits, teacher_logits, weights, share)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        return {f"acceptance_{s}": round(losses(rows, 1.0)[1].item(), 4) for s, rows in heldout.items()}

    batches = packed_batches(corpus.join(sampled), schedule, device)
    facts = optimize(student, batches, schedule, lambda r, p: losses(r, p)[0], validate, "distil draft")
    save_model(student, args.work / "tokenizer", args.out / "draft")
    facts |= {
        "tv_weight": args.tv_weight,
        "prompt_weight": args.prompt_weight,
        "sampled_tokens": int(sampled.tokens.size),
    }
    record_run(args.work / "draft_training.json", facts, args.resume)


def parse_args() -> argparse.Namespace:
    models = Path(__file__).parents[2] / "server" / "demo"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder with the five *.jsonl.zst source files (stage prepare)")
    add("--work", type=Path, default=Path("build/demo-pair"), help="folder for intermediate files")
    add("--out", type=Path, default=models, help="folder that receives target/, draft/ and the model card")
    add("--stages", default=",".join(STAGES), help="comma-separated stages to run, in order")
    add("--resume", action="store_true", help="continue from the weights in --out instead of fresh ones")
    add("--seed", type=int, default=0, help="seed of initialisation, shuffling and sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--row-length", type=int, default=CONTEXT_LENGTH, help="tokens in a packed training row")
    add("--target-steps", type=int, default=3600, help="optimizer steps of the target")
    add("--target-minutes", type=float, default=1e6, help="stop the target's training by then")
    add("--target-rows", type=int, default=32, help="rows in a batch of the target")
    add("--target-lr", type=float, default=2e-3, help="peak learning rate of the target")
    add("--dropout", type=float, default=0.1, help="residual and embedding dropout of the target")
    add("--weight-decay", type=float, default=0.1, help="weight decay of the target's matrices")
    add("--draft-steps", type=int, default=10000, help="optimizer steps of the draft")
    add("--draft-minutes", type=float, default=1e6, help="stop the draft's training by then")
    add("--draft-rows", type=int, default=32, help="rows in a batch of the draft")
    add("--draft-lr", type=float, default=4e-3, help="peak learning rate of the draft")
    add("--tv-weight", type=float, default=0.9, help="final weight of total variation against KL, 0 to 1")
    add("--prompt-weight", type=float, default=0.2, help="loss weight of user and system turns, draft only")
    add("--sample-tokens", type=int, default=6_000_000, help="tokens to sample from the target")
    add("--sample-rows", type=int, default=4096, help="sequences sampled at once")
    add("--sample-length", type=int, default=384, help="tokens in a sampled sequence")
    add("--warmup-steps", type=int, default=200, help="steps of linear learning-rate warm-up")
    add("--dialogue-repeats", type=int, default=2, help="passes over dialogues per pass over prose")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    stages = args.stages.split(",")
    unknown = set(stages) - set(STAGES)
    if unknown or ("prepare" in stages and args.data is None):
        sys.exit(f"unknown stages: {sorted(unknown)}" if unknown else "stage prepare needs --data")
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shared = {
        "row_length": args.row_length,
        "warmup_steps": args.warmup_steps,
        "seed": args.seed,
    }
    if "prepare" in stages:
        prepare(args.data, args.work, VOCAB_SIZE)
    if "target" in stages:
        schedule = Schedule(
            args.target_steps, args.target_minutes, args.target_rows, learning_rate=args.target_lr,
            weight_decay=args.weight_decay, dialogue_repeats=args.dialogue_repeats, **shared,
        )  # fmt: skip
        train_target(args, schedule, device)
    if "draft" in stages:
        schedule = Schedule(
            args.draft_steps, args.draft_minutes, args.draft_rows, learning_rate=args.draft_lr,
            weight_decay=0.01, dialogue_repeats=args.dialogue_repeats + 1, **shared,
        )  # fmt: skip
        train_draft(args, schedule, device)
    if "evaluate" in stages:
        evaluate.run(args.out, args.work, device)


if __name__ == "__main__":
    main()
