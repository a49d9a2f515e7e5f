"""Training data of the embedded model pair: reading, splitting, tokenizing and packing.

This module turns the public text listed in ``MODEL_CARD.md`` into one tokenizer, one packed
training corpus and one held-out corpus. It is used by ``train.py`` and ``evaluate.py`` only; the
serving daemon never imports it.

Held-out rule: a record is held out when its ``split`` field is ``test`` or when ``int(md5(text),
16) % 50 == 0``, where ``text`` is the record's turns joined by newlines (question and answer for
GSM8K, the ``text`` field for Gutenberg). Everything else is training text.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

PROMPTS = Path(__file__).parents[2] / "loadtest" / "prompts"
"""Folder of the held-out prompts."""
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL_TOKENS = (PAD, BOS, END, *ROLE_TOKENS.values())

CHAT_TEMPLATE = """{{- bos_token }}
{%- if tools %}
{{- '<|system|>You may call these functions: ' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{{- 'Write a call so: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Unknown role: ' + message['role']) }}
{%- endif %}
{%- if message['role'] == 'tool' %}
{{- '<|user|><tool_response>' + message['content'] | trim + '</tool_response><|end|>' }}
{%- else %}
{{- '<|' + message['role'] + '|>' + message['content'] | trim }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson }}
{{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""

# Words with an optional leading space or apostrophe, single digits, punctuation runs, white space.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

SOURCE_FILES = {
    "sgd": "sgd_dialogues",
    "persona": "synthetic_persona_chat",
    "taskmaster": "taskmaster4_dialogues",
    "gsm8k": "gsm8k_train",
    "gutenberg": "gutenberg_children",
}
DIALOGUE_SOURCES = ("sgd", "persona", "taskmaster", "gsm8k")
SYSTEM_MESSAGES = {
    "sgd": "You help with bookings, reservations and everyday information.",
    "persona": "You are making friendly small talk with someone you have just met.",
    "taskmaster": "You take orders in a coffee shop.",
    "gsm8k": "You solve arithmetic word problems step by step.",
    "gutenberg": "You tell stories to children.",
}
GENERIC_SYSTEM_MESSAGE = "You are a helpful assistant."
STORY_REQUESTS = ("Tell me a story.", "Please tell me a fairy tale.", "Can you read me a story?")
STORY_CONTINUATIONS = ("Go on.", "Please continue.", "What happened next?", "And then?")
STORY_REPLY_CHARACTERS = 600

Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One training or held-out text: a conversation (``messages``) or plain prose (``text``)."""

    source: str
    digest: int
    held_out: bool
    messages: tuple[Message, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, one after another.

    Document ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
    """

    tokens: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    sources: npt.NDArray[np.str_]

    def save(self, path: Path) -> None:
        np.savez_compressed(path, tokens=self.tokens, offsets=self.offsets, sources=self.sources)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["offsets"], arrays["sources"])

    def document(self, index: int) -> npt.NDArray[np.uint16]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def indices(self, source: str) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.sources == source)

    def join(self, other: "Corpus") -> "Corpus":
        """Both corpora as one."""
        return Corpus(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
            np.concatenate([self.sources, other.sources]),
        )

    def pack(
        self, repeats: Mapping[str, int], row_length: int, generator: np.random.Generator
    ) -> npt.NDArray[np.uint16]:
        """One shuffled pass over the documents, cut into rows.

        A source appears ``repeats[source]`` times.
        """
        order = np.concatenate([np.tile(self.indices(source), count) for source, count in repeats.items()])
        generator.shuffle(order)
        stream = np.concatenate([self.document(index) for index in order])
        rows = len(stream) // row_length
        return stream[: rows * row_length].reshape(rows, row_length)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a zstd-compressed JSON-lines file."""
    import zstandard  # only this stage needs it

    text = zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read().decode("utf-8")
    for line in text.split("\n"):
        if line:
            yield json.loads(line)


def read_documents(data_dir: Path) -> list[Document]:
    """All records of the five sources in a fixed order, each marked as held out or not."""
    documents = []
    for source, stem in SOURCE_FILES.items():
        for record in tqdm(read_jsonl(data_dir / f"{stem}.jsonl.zst"), desc=f"read {source}", unit="record"):
            document = to_document(source, record)
            if document is not None:
                documents.append(document)
    return documents


def to_document(source: str, record: Mapping[str, Any]) -> Document | None:
    """One record as a document, or None when a turn is empty or holds an unfilled placeholder."""
    if source == "gutenberg":
        text = str(record["text"])
    elif source == "gsm8k":
        text = f"{record['question']}\n{record['answer']}"
    else:
        text = "\n".join(turn for _, turn in record["turns"])
    digest = int(hashlib.md5(text.encode("utf-8")).hexdigest(), 16)
    held_out = record.get("split") == "test" or digest % 50 == 0
    if source == "gutenberg":
        return Document(source, digest, held_out, text=text.strip())
    messages = gsm8k_messages(record) if source == "gsm8k" else merge_turns(record["turns"])
    if not messages or any(not m["content"] or "[name]" in m["content"] for m in messages):
        return None
    return Document(source, digest, held_out, messages=messages)


def gsm8k_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """A word problem as a two-turn conversation, without the ``<<48/2=24>>`` calculator marks."""
    answer = re.sub(r"<<.*?>>", "", str(record["answer"]))
    answer = re.sub(r"\n#### *(.*)$", r"\nThe answer is \1.", answer)
    return ({"role": "user", "content": str(record["question"]).strip()},
            {"role": "assistant", "content": answer.strip()})  # fmt: skip


def merge_turns(turns: Sequence[Sequence[str]]) -> tuple[Message, ...]:
    """Turns as messages that start with the user and alternate.

    Neighbours of one role are merged.
    """
    messages: list[Message] = []
    for role, content in turns:
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += " " + content.strip()
        elif messages or role == "user":
            messages.append({"role": role, "content": content.strip()})
    return tuple(messages)


def story_messages(document: Document) -> tuple[Message, ...]:
    """A piece of prose as a conversation.

    The user asks for a story and keeps asking for more.
    """
    replies: list[str] = []
    for paragraph in document.text.split("\n"):
        if replies and len(replies[-1]) + len(paragraph) <= STORY_REPLY_CHARACTERS:
            replies[-1] += "\n" + paragraph
        else:
            replies.append(paragraph)
    messages: list[Message] = []
    for number, reply in enumerate(replies):
        choices = STORY_CONTINUATIONS if number else STORY_REQUESTS
        request = choices[(document.digest // 1000 + number) % len(choices)]
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": reply.strip()}]
    return tuple(messages)


def render(document: Document, augment: bool) -> str:
    """The document as the chat template would write it.

    With ``augment`` a quarter of the conversations start with a system message and a quarter of the
    prose becomes a story-telling conversation; held-out documents are rendered without.
    """
    messages = document.messages
    variant = document.digest // 50 % 8
    if augment and not messages and variant < 2:
        messages = story_messages(document)
    if not messages:
        return f"{BOS}{document.text}{END}"
    if augment and variant in (0, 3):
        content = SYSTEM_MESSAGES[document.source] if variant == 0 else GENERIC_SYSTEM_MESSAGE
        messages = ({"role": "system", "content": content}, *messages)
    return BOS + "".join(f"{ROLE_TOKENS[m['role']]}{m['content']}{END}" for m in messages)


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on all dialogues and a third of the prose."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for document in tqdm(documents, desc="train tokenizer", unit="doc")
        for text in ([m["content"] for m in document.messages] or [document.text])
        if not document.held_out and (document.messages or document.digest % 3 == 0)
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLE_TOKENS.values()),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=2048,
    )


def encode(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, augment: bool) -> Corpus:
    """The documents as token ids, in order."""
    pieces: list[npt.NDArray[np.uint16]] = []
    batch = 512
    for start in tqdm(range(0, len(documents), batch), desc="tokenize", unit="batch"):
        texts = [render(document, augment) for document in documents[start : start + batch]]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        pieces += [np.asarray(ids, dtype=np.uint16) for ids in encoded]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return Corpus(np.concatenate(pieces), offsets, np.array([d.source for d in documents]))


def write_heldout_prompts(documents: Sequence[Document], out_dir: Path) -> None:
    """Small samples of held-out text for benchmarks.

    Conversations that end with a user turn, and prose.
    """
    per_source = {"sgd": 90, "persona": 50, "taskmaster": 30, "gsm8k": 30}
    held_out = sorted((d for d in documents if d.held_out), key=lambda d: d.digest)
    with (out_dir / "heldout_dialogues.jsonl").open("w", encoding="utf-8") as file:
        for source, count in per_source.items():
            for number, document in enumerate([d for d in held_out if d.source == source][:count]):
                users = sum(m["role"] == "user" for m in document.messages[:-1])
                turns = min(1 + number % 5, max(users, 1))
                record = {
                    "id": f"{source}-{number:03d}",
                    "source": source,
                    "messages": document.messages[: 2 * turns - 1],
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    with (out_dir / "heldout_gutenberg.jsonl").open("w", encoding="utf-8") as file:
        for number, document in enumerate([d for d in held_out if d.source == "gutenberg"][:40]):
            text = document.text[:300].rsplit(" ", 1)[0]
            record = {"id": f"gutenberg-{number:03d}", "source": "gutenberg", "text": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def prepare(data_dir: Path, work_dir: Path, vocab_size: int) -> None:
    """Write the tokenizer, both corpora and the benchmark prompts."""
    work_dir.mkdir(parents=True, exist_ok=True)
    documents = read_documents(data_dir)
    tokenizer = train_tokenizer(documents, vocab_size)
    tokenizer.save_pretrained(work_dir / "tokenizer")
    encode([d for d in documents if not d.held_out], tokenizer, augment=True).save(work_dir / "train.npz")
    encode([d for d in documents if d.held_out], tokenizer, augment=False).save(work_dir / "heldout.npz")
    write_heldout_prompts(documents, PROMPTS)
