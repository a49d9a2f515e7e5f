"""Measure the embedded model pair on held-out text.

Write ``evaluation.json`` and the model card.

Reports, per source and over all dialogues: loss of both models, and the single-draft acceptance at
temperature 1, which is the mean over positions of ``sum_x min(p(x), q(x))`` for target distribution
p and draft distribution q. This measures the models, not the serving engine: no time is taken and
no drafted token is verified here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from research.demo.data import BOS, DIALOGUE_SOURCES, END, PROMPTS, ROLE_TOKENS, SOURCE_FILES, Corpus
from research.demo.model_card import write_model_card
from research.demo.modeling import count_parameters, load_model, load_tokenizer, read_json, write_json

DOCUMENTS_PER_SOURCE = 200
GENERATED_TOKENS = 96
SAMPLE_CONVERSATIONS = (
    (
        "I'd like to book a table for two tonight.",
        "Italian food in San Jose, please.",
        "At 7 pm. Thank you.",
    ),
    (
        "Hi! What do you like to do for fun?",
        "That sounds great. Do you have any pets?",
        "Nice talking to you!",
    ),
    ("Please tell me a fairy tale.", "What happened next?"),
)


@dataclass
class Sums:
    """Totals over predicted tokens; ``means`` turns them into the reported numbers."""

    tokens: int = 0
    characters: int = 0
    target_nats: float = 0.0
    draft_nats: float = 0.0
    target_entropy: float = 0.0
    acceptance: float = 0.0
    best_of_4: float = 0.0

    def add(self, other: "Sums") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def means(self) -> dict[str, float]:
        values: dict[str, float] = {"tokens": self.tokens}
        for name in ("target", "draft"):
            nats = getattr(self, f"{name}_nats")
            values[f"{name}_nats_per_token"] = round(nats / self.tokens, 4)
            if self.characters:
                values[f"{name}_bits_per_character"] = round(nats / math.log(2) / self.characters, 4)
        values["target_entropy_nats"] = round(self.target_entropy / self.tokens, 4)
        values["acceptance"] = round(self.acceptance / self.tokens, 4)
        values["acceptance_bound_4_drafts"] = round(self.best_of_4 / self.tokens, 4)
        return values


def token_sums(log_p: Tensor, log_q: Tensor, labels: Tensor, mask: Tensor, characters: int) -> Sums:
    """Sums over the masked positions of one document."""
    p, q = log_p.exp(), log_q.exp()
    labels = labels.unsqueeze(-1)

    def total(values: Tensor) -> float:
        return float(values[mask].double().sum())

    return Sums(
        tokens=int(mask.sum()),
        characters=characters,
        target_nats=-total(log_p.gather(-1, labels).squeeze(-1)),
        draft_nats=-total(log_q.gather(-1, labels).squeeze(-1)),
        target_entropy=-total((p * log_p).sum(-1)),
        acceptance=total(torch.minimum(p, q).sum(-1)),
        best_of_4=total(torch.minimum(p, 1 - (1 - q) ** 4).sum(-1)),
    )


class Evaluator:
    """Both models, their tokenizer and the measurements made with them."""

    def __init__(self, models_dir: Path, device: torch.device) -> None:
        self.device = device
        self.target: LlamaForCausalLM = load_model(models_dir / "target", device, attention="sdpa")
        self.draft: LlamaForCausalLM = load_model(models_dir / "draft", device, attention="sdpa")
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(models_dir / "target")

    def assistant_mask(self, ids: Sequence[int]) -> list[bool]:
        """Return for every token after the first whether it belongs to an assistant turn.

        The closing token belongs to it.
        """
        start = self.tokenizer.convert_tokens_to_ids(ROLE_TOKENS["assistant"])
        end = self.tokenizer.convert_tokens_to_ids(END)
        inside, mask = False, []
        for token in ids:
            mask.append(inside)
            inside = token == start or (inside and token != end)
        return mask[1:]

    def characters(self, ids: list[int]) -> int:
        return len(self.tokenizer.decode(ids, skip_special_tokens=True))

    @torch.no_grad()
    def log_probabilities(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log q at every position but the last."""
        logits = (model(ids[None, :-1], use_cache=False).logits[0] for model in (self.target, self.draft))
        log_p, log_q = (values.float().log_softmax(-1) for values in logits)
        return log_p, log_q

    def document_sums(self, ids: list[int]) -> tuple[Sums, Sums]:
        """Over all tokens, and over the assistant turns."""
        tensor = torch.tensor(ids, device=self.device)
        log_p, log_q = self.log_probabilities(tensor)
        mask = torch.tensor(self.assistant_mask(ids), device=self.device)
        spoken = [token for token, inside in zip(ids[1:], mask.tolist(), strict=True) if inside]
        everything = token_sums(log_p, log_q, tensor[1:], torch.ones_like(mask), self.characters(ids))
        return everything, token_sums(log_p, log_q, tensor[1:], mask, self.characters(spoken))

    def source_sums(self, heldout: Corpus, source: str) -> tuple[Sums, Sums]:
        everything, assistant = Sums(), Sums()
        documents = heldout.indices(source)
        chosen = np.random.default_rng(0).permutation(documents)[:DOCUMENTS_PER_SOURCE]
        for index in tqdm(chosen, desc=f"evaluate {source}", unit="doc"):
            sums = self.document_sums(heldout.document(int(index)).tolist())
            everything.add(sums[0])
            assistant.add(sums[1])
        return everything, assistant

    def heldout_report(self, heldout: Corpus) -> dict[str, Any]:
        """All measurements by source, and the dialogue sources together.

        Each is weighted by its tokens.
        """
        report: dict[str, Any] = {}
        all_tokens, assistant_turns = Sums(), Sums()
        for source in SOURCE_FILES:
            everything, assistant = self.source_sums(heldout, source)
            report[source] = {"all_tokens": everything.means()}
            if source in DIALOGUE_SOURCES:
                report[source]["assistant_turns"] = assistant.means()
                all_tokens.add(everything)
                assistant_turns.add(assistant)
        report["dialogues"] = {"all_tokens": all_tokens.means(), "assistant_turns": assistant_turns.means()}
        return report

    @torch.no_grad()
    def generate(self, prompt: list[int], temperature: float, length: int) -> list[int]:
        """Tokens sampled from the target after the prompt, the closing token included."""
        ids = torch.tensor([prompt], device=self.device)
        output = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0,
            max_new_tokens=length,
        )  # fmt: skip
        return [int(token) for token in output[0, len(prompt) :]]

    def sampled_report(self, prompts: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Measure acceptance as in serving: along replies that the target itself samples."""
        sums = Sums()
        for record in tqdm(prompts, desc="evaluate sampled replies", unit="prompt"):
            prompt = self.chat_prompt(record["messages"])
            ids = prompt + self.generate(prompt, 1.0, GENERATED_TOKENS)
            tensor = torch.tensor(ids, device=self.device)
            log_p, log_q = self.log_probabilities(tensor)
            mask = torch.arange(1, len(ids), device=self.device) >= len(prompt)
            sums.add(token_sums(log_p, log_q, tensor[1:], mask, self.characters(ids[len(prompt) :])))
        return sums.means()

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return [int(token) for token in self.tokenizer(str(text), add_special_tokens=False)["input_ids"]]

    def converse(self, user_turns: Sequence[str], temperature: float) -> list[dict[str, str]]:
        """A conversation with the given user turns and sampled replies."""
        messages: list[dict[str, str]] = []
        for turn in user_turns:
            messages.append({"role": "user", "content": turn})
            reply = self.generate(self.chat_prompt(messages), temperature, length=200)
            content = str(self.tokenizer.decode(reply, skip_special_tokens=True)).strip()
            messages.append({"role": "assistant", "content": content})
        return messages


def run(models_dir: Path, work_dir: Path, device: torch.device) -> None:
    """Evaluate the pair and write ``evaluation.json`` and ``MODEL_CARD.md`` next to the models."""
    evaluator = Evaluator(models_dir, device)
    assert evaluator.tokenizer.convert_tokens_to_ids(BOS) == evaluator.target.config.bos_token_id
    heldout = Corpus.load(work_dir / "heldout.npz")
    with (PROMPTS / "heldout_dialogues.jsonl").open(encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    torch.manual_seed(0)
    evaluation = {
        "parameters": {
            "target": count_parameters(evaluator.target),
            "draft": count_parameters(evaluator.draft),
        },
        "heldout": evaluator.heldout_report(heldout),
        "sampled_replies": evaluator.sampled_report(prompts),
        "training": {name: read_json(work_dir / f"{name}_training.json") for name in ("target", "draft")},
        "conversations": [evaluator.converse(turns, temperature=0.7) for turns in SAMPLE_CONVERSATIONS],
    }
    write_json(models_dir / "evaluation.json", evaluation)
    configs = {"target": evaluator.target.config.to_dict(), "draft": evaluator.draft.config.to_dict()}
    write_model_card(models_dir, evaluation, configs)
