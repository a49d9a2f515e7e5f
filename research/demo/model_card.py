"""Write ``MODEL_CARD.md`` of the embedded model pair from the numbers in ``evaluation.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LICENCES = """\
| text | used for | licence | attribution |
| --- | --- | --- | --- |
| Schema-Guided Dialogue (SGD), [paper](https://arxiv.org/abs/1909.05855) | bookings and services | \
[CC BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/) | Rastogi et al., Google, 2019 |
| Synthetic-Persona-Chat, [paper](https://arxiv.org/abs/2312.10007) | small talk | \
[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/) | Jandaghi et al., Google, 2023 |
| Taskmaster-4, [repository](https://github.com/google-research-datasets/Taskmaster) | coffee orders | \
[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/) | Byrne et al., Google |
| GSM8K, [paper](https://arxiv.org/abs/2110.14168) | easy arithmetic | MIT | Cobbe et al., OpenAI, 2021 |
| Project Gutenberg, 183 children's books | prose and fairy tales | public domain in the United States | \
Project Gutenberg |

The text was changed: dialogues were rewritten in the chat format (neighbouring turns of one speaker \
merged, records with unfilled `[name]` placeholders left out), GSM8K's calculator marks were removed, a \
quarter of the conversations got a system message, and a quarter of the prose was cut into story-telling \
conversations. `heldout_dialogues.jsonl` holds excerpts of SGD (CC BY-SA 4.0), Synthetic-Persona-Chat and \
Taskmaster-4 (CC BY 4.0) and GSM8K (MIT) under those licences; `heldout_gutenberg.jsonl` is public domain."""

USE = """\
The pair exists so that the daemon, its tests and its benchmarks run on any machine without a download. The \
target holds a short conversation in the domains of its training text. It is not an assistant: it knows no \
facts, cannot calculate, invents names, numbers and bookings, and its stories ramble. It may repeat the \
biases of its sources, among them those of nineteenth-century children's books."""

REBUILD = """\
```
python -m research.demo.train --data DIR --stages prepare,target,draft \\
    --target-steps 3589 --draft-steps 4733 --draft-rows 16 --prompt-weight 1
python -m research.demo.train --stages draft,evaluate --resume --seed 1 \\
    --draft-steps 7802 --sample-tokens 4700000 --dialogue-repeats 3
```

`DIR` holds the five sources as `*.jsonl.zst` files. This makes a comparable pair, not the same bits: GPU \
arithmetic is not reproducible across versions, and in the first run the sampled text was seen once per pass \
over the prose instead of three times."""

FORMAT = """\
Both models share one byte-level BPE tokenizer of 4,096 entries that splits numbers into digits. A \
conversation reads `<|bos|><|user|>text<|end|><|assistant|>text<|end|>` and so on, with an optional \
`<|system|>text<|end|>` first; plain text reads `<|bos|>text`. `<|end|>` is the end-of-sequence token. The \
chat template is in the tokenizer's folder. Rows of training text were 2,048 tokens long."""

HELD_OUT_RULE = """\
A record is held out when its `split` field is `test`, or when `int(md5(text), 16) % 50 == 0`, `text` being \
its turns joined by newlines (question and answer for GSM8K, the passage for Gutenberg). SGD's test split \
contains services that its training split lacks, so it is harder than the rest. Gutenberg passages are held \
out one by one: other passages of the same book were trained on."""

ACCEPTANCE = """\
Acceptance is the mean over positions of the sum over tokens of `min(p, q)` at temperature 1 with no \
truncation: the probability that one drafted token is accepted. The last column bounds what four \
independently drafted tokens can reach, by the mean of the sum of `min(p, 1 - (1 - q)^4)`. The row \
"replies sampled from the target" takes the prompts of `heldout_dialogues.jsonl` and measures along \
continuations that the target samples itself, as when serving; losses there are against its own samples. \
Each source is measured on 200 held-out documents, or on all of them where there are fewer; "all dialogues" \
joins the four dialogue sources, every token counting the same. Weights are bf16, arithmetic float32."""

TITLES = {
    "dialogues": "all dialogues",
    "sgd": "SGD",
    "persona": "Synthetic-Persona-Chat",
    "taskmaster": "Taskmaster-4",
    "gsm8k": "GSM8K",
    "gutenberg": "Gutenberg",
}


def run_values(evaluation: Mapping[str, Any], name: str, key: str, unit: float = 1) -> str:
    """One number of every training run of a model, joined by plus signs."""
    return " + ".join(
        f"{run[key] if unit == 1 else round(run[key] / unit, 1):,}" for run in evaluation["training"][name]["runs"]
    )


def shape_table(evaluation: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Architecture and training of both models side by side."""

    def shapes(*keys: str) -> list[str]:
        return [" / ".join(str(config[key]) for key in keys) for config in configs.values()]

    def numbers(key: str) -> list[str]:
        return [run_values(evaluation, name, key) for name in configs]

    runs = {name: evaluation["training"][name]["runs"] for name in configs}
    rows = [
        ("parameters", [f"{evaluation['parameters'][name]:,}" for name in configs]),
        ("layers", shapes("num_hidden_layers")),
        ("hidden / intermediate", shapes("hidden_size", "intermediate_size")),
        ("heads / key-value heads / size", shapes("num_attention_heads", "num_key_value_heads", "head_dim")),
        ("objective", ["next-token cross-entropy", "total variation and KL to the target"]),
        ("steps", numbers("steps")),
        ("batch, rows of 2,048 tokens", numbers("batch_rows")),
        ("million tokens seen", [run_values(evaluation, name, "tokens", unit=1e6) for name in configs]),
        ("peak learning rate", numbers("learning_rate")),
        ("seconds of training", numbers("seconds")),
        ("hardware", [runs[name][-1]["hardware"] for name in configs]),
    ]
    lines = ["| | target | draft |", "| --- | --- | --- |"]
    lines += [f"| {label} | {values[0]} | {values[1]} |" for label, values in rows]
    return "\n".join(lines)


def measurement_row(title: str, scope: str, values: Mapping[str, float]) -> str:
    bits = [f"{values.get(f'{n}_bits_per_character', float('nan')):.3f}" for n in ("target", "draft")]
    return (
        f"| {title} | {scope} | {values['tokens']:,} | {values['target_nats_per_token']:.3f} | {bits[0]} "
        f"| {values['draft_nats_per_token']:.3f} | {bits[1]} | **{values['acceptance']:.3f}** "
        f"| {values['acceptance_bound_4_drafts']:.3f} |"
    )


def measurement_table(evaluation: Mapping[str, Any]) -> str:
    """Losses and acceptance, one line per source and scope."""
    lines = [
        "| text | scope | tokens | target nats/token | target bits/char | draft nats/token | draft bits/char "
        "| acceptance | bound, 4 drafts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for source, title in TITLES.items():
        for scope in ("assistant_turns", "all_tokens"):
            values = evaluation["heldout"][source].get(scope)
            if values:
                lines.append(measurement_row(title, scope.replace("_", " "), values))
    lines.append(measurement_row("replies sampled from the target", "assistant turns", evaluation["sampled_replies"]))
    return "\n".join(lines)


def conversation_text(messages: Sequence[Mapping[str, str]]) -> str:
    lines = [f"> **{m['role']}:** " + m["content"].replace("\n", "\n> ") for m in messages]
    return "\n>\n".join(lines)


def write_model_card(models_dir: Path, evaluation: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the card next to the two model folders."""
    draft = evaluation["training"]["draft"]["runs"][-1]
    conversations = "\n\n".join(
        f"### Conversation {number}\n\n{conversation_text(messages)}"
        for number, messages in enumerate(evaluation["conversations"], start=1)
    )
    sections = [
        "# The embedded model pair",
        "Written by `evaluate.py` from `evaluation.json`; made by `python -m research.demo.train`.",
        f"## Use\n\n{USE}",
        f"## Data and licences\n\n{LICENCES}",
        f"## Models\n\nTwo Llama models with tied embeddings, saved in bfloat16.\n\n{shape_table(evaluation, configs)}",
        "A plus sign separates a run from one that resumed its weights. The draft saw the training text and "
        f"{run_values(evaluation, 'draft', 'sampled_tokens', unit=1e6)} million tokens sampled from the "
        f"target. Its loss moved from pure KL to {draft['tv_weight']:g} total variation and "
        f"{1 - draft['tv_weight']:.2g} KL; in the last run user and system turns, which are never drafted, "
        f"had weight {draft['prompt_weight']:g}.",
        f"## Rebuilding\n\n{REBUILD}",
        f"## Format\n\n{FORMAT}",
        f"## Held-out text\n\n{HELD_OUT_RULE}",
        f"## Measurements\n\n{ACCEPTANCE}\n\n{measurement_table(evaluation)}",
        f"## Conversations\n\nThe target at temperature 0.7, first attempt, not selected.\n\n{conversations}",
    ]
    (models_dir / "MODEL_CARD.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
