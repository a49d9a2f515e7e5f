"""`analyze gguf-tokens`: compares the tokens of a GGUF file with llama.cpp's on thousands of lines.

Each line is encoded with special tokens read and as plain text, and its tokens are decoded again.
Small vocabularies of every known pre-tokenizer are compared, too. Needs llama-cpp-python. Not for:
speed, and answers of models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata as packages
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from engine.errors import ConfigError
from engine.models.gguf.file import open_file
from engine.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.models.gguf.tokenizer import TokenizerFiles, tokenizer_files
from loadtest.results import document, table
from research.analysis.gguf_lines import Line, lines, small_texts
from research.analysis.gguf_vocabularies import byte_level, sentence_piece, with_texts, write_vocabulary
from research.analysis.llama_cpp_tokens import LlamaCppVocabulary

_MOST_SHOWN = 5
_SHOWN = 6
"""Tokens, or characters, from the first difference on."""
_BATCH = 500
_NEWER = (
    "897 1b4e-1b4f 1b7f 1c89-1c8a 2427-2429 2ffc-2fff 31e4-31e5 31ef a7cb-a7cd a7da-a7dc 105c0-105f3 10d40-10d8f "
    "10ec2-10ec4 10efc 11380-113e2 116d0-116e3 11bc0-11bf9 11f5a 13460-143fa 16100-16139 16d40-16d79 18cff 1cc00-1ceb3 "
    "1e5d0-1e5ff 1f8b2-1f8c1 1fa89 1fa8f 1fabe 1fac6 1fadc 1fadf 1fae9 1fbcb-1fbef"
)
"""Characters of Unicode 16, which llama.cpp's tables do not have (0.3.36 of llama-cpp-python), in
hexadecimal.
"""
GOLDEN_LINES = (
    "Hello world, it's 12345 o'clock: I'LL pay $1,234.50!",
    "def  f(x):\n\treturn x**2  # two\n\n\n\nif a != b:\r\n    pass",
    "  leading,   inner   and trailing   ",
    "ǅungla Été ÀÉÎ ÉTÉ fooBar HTTPServer's don'T 'Tis we'Ve",
    "中文 123 字かな カナ 한국어 ไทย ١٢٣ १२ Ⅷ ½²",
    "a\u0301e\u0301 \u0301x कि न् ि",
    "👩‍👩‍👧 🇨🇭 1️⃣ ✅!! ~ ~~> <= `a|b` ^_^ €5 ©x",
    "\xa0\u3000x\u2028y\x85z \x00\x1c\u200b\ufeff .\x7f.\x7f. ,\x7f;\x7f!",
    "<|im_start|>user\nHi<think>    x<|im_end|>\n",
    "、。…a, b.c/d;\n/\n//x\r\n\r\ny 3.14 1e-9 v2",
)
"""Lines on which the splits of all kinds differ."""
END_TEXTS = (
    "<|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|return|> </s> <end_of_turn> <eos> <EOT> _<EOT> [EOT] [EOS]",
    "<|end|> <|return|> <|call|> <|channel|> <|message|> <|start|>",
    "<|end|> <|calls|> <|flush|> <end_of_utterance>",
    "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|>",
    "<PRE> <SUF> <MID> <PAD> <REPO> </s> <turn|> <|tool_response>",
    "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜> <｜end▁of▁sentence｜> <reponame> [e~[",
)
"""Texts of tokens in vocabularies whose end tokens are compared."""
_SENTENCE_PIECE = {
    "llama": {},
    "llama without a space prefix": {"add_space_prefix": False},
    "llama without a begin token": {"add_bos_token": False, "add_eos_token": True},
}


class TokenReference(Protocol):
    """Tokenizer that others are compared with; `LlamaCppVocabulary` explains its methods."""

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(kw_only=True)
class Comparison:
    """Lines of one file by the kind of their content."""

    num_lines: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    differences: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Differences by how the line was compared: `tokens`, `tokens as text` or `text back`."""

    def note(self, compared: str, line: Line, ours: Sequence[int] | str, theirs: Sequence[int] | str) -> None:
        """Note a line whose tokens or text differ, with what follows the first difference."""
        pairs = enumerate(zip(ours, theirs, strict=False))
        begin = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
        end = begin + _SHOWN
        shown: dict[str, Any] = {"kind": line.kind, "line": line.text, "place": begin}
        shown |= {"ours": ours[begin:end], "llama.cpp": theirs[begin:end]}
        self.differences[compared].append({**shown, "explanation": explanation(line.text)})

    def summary(self) -> dict[str, Any]:
        """Return the counts, and the first differences of each kind."""
        found = [one for differences in self.differences.values() for one in differences]
        return {
            "lines": self.num_lines.total(),
            "lines_by_kind": dict(self.num_lines),
            "tokens": self.num_tokens,
            "differences": {compared: len(found) for compared, found in self.differences.items()},
            "explained": dict(Counter(one["explanation"] for one in found if one["explanation"])),
            "unexplained": sum(one["explanation"] is None for one in found),
            "examples": [one for kind in self.differences.values() for one in kind[:_MOST_SHOWN]],
        }


def explanation(text: str) -> str | None:
    """Return why the tokens of a text may differ from llama.cpp's; None if no reason is known."""
    if any(_is_newer(ord(character)) for character in text):
        return "characters of Unicode 16, which are unassigned in llama.cpp's tables"
    return None


def _is_newer(number: int) -> bool:
    for entry in _NEWER.split():
        first, _, last = entry.partition("-")
        if int(first, 16) <= number <= int(last or first, 16):
            return True
    return False


def compare(files: TokenizerFiles, reference: TokenReference, compared: Sequence[Line], progress: Any) -> Comparison:
    """Compare all lines."""
    result = Comparison()
    for begin in range(0, len(compared), _BATCH):
        batch = compared[begin : begin + _BATCH]
        with_special = _encoded(files, batch, reads_special=True)
        as_text = _encoded(files, batch, reads_special=False)
        back = files.tokenizer.decode_batch(as_text, skip_special_tokens=False)
        for number, line in enumerate(batch):
            result.num_lines[line.kind] += 1
            result.num_tokens += len(with_special[number])
            theirs = reference.encode(line.text, add_special=True, parse_special=True)
            if with_special[number] != theirs:
                result.note("tokens", line, with_special[number], theirs)
            theirs = reference.encode(line.text, add_special=False, parse_special=False)
            if as_text[number] != theirs:
                result.note("tokens as text", line, as_text[number], theirs)
            written = _without_prefix(files, reference.decode(as_text[number]))
            if back[number] != written:
                result.note("text back", line, back[number], written)
            progress.update()
    return result


def _encoded(files: TokenizerFiles, batch: Sequence[Line], reads_special: bool) -> list[list[int]]:
    """Return the tokens of lines.

    Also the tokens that each text begins with if special tokens are read.
    """
    tokenizer = files.tokenizer
    tokenizer.encode_special_tokens = not reads_special
    encoded = tokenizer.encode_batch([line.text for line in batch], add_special_tokens=reads_special)
    tokenizer.encode_special_tokens = False
    return [list(one.ids) for one in encoded]


def _without_prefix(files: TokenizerFiles, text: str) -> str:
    """Return a text without the space that the tokenizer puts before each text."""
    has_prefix = files.tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("▁")
    return text[1:] if has_prefix and text.startswith(" ") else text


def compare_roles(files: TokenizerFiles, reference: LlamaCppVocabulary) -> dict[str, Any]:
    """Compare end tokens, added tokens, and the bytes of every token.

    `differences` names what differs.
    """
    theirs = reference.facts()
    ours = {
        "ends": list(files.end_ids),
        "begin": theirs["begin"] if files.begin_id is None else files.begin_id,
        "adds_begin": files.config["add_bos_token"],
        "adds_end": files.config["add_eos_token"],
    }
    decoded = files.tokenizer.decode_batch(
        [[token] for token in range(reference.num_tokens)], skip_special_tokens=False
    )
    written = [_without_prefix(files, piece.decode("utf-8", "replace")) for piece in reference.pieces]
    texts = [number for number, text in enumerate(written) if text != decoded[number]]
    differences = [name for name, value in theirs.items() if ours[name] != value]
    return {**ours, "texts_of_tokens": reference.num_tokens, "differences": differences + (["texts"] if texts else [])}


def _rendered(files: TokenizerFiles, messages: list[dict[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    roles = {name: text for name, text in files.config.items() if name.endswith("_token") and isinstance(text, str)}
    ((text, *_), _) = render_jinja_template(
        [messages], None, None, files.chat_template, add_generation_prompt=True, **roles
    )
    return str(text)


def _special_texts(files: TokenizerFiles) -> list[str]:
    return [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]


def compare_file(path: Path, count: int, seed: int, name: str) -> dict[str, Any]:
    """Compare a file's tokenizer on `count` lines."""
    stored = open_file(path).metadata
    files = tokenizer_files(stored)
    render: Callable[[list[dict[str, str]]], str] | None = None
    if files.chat_template is not None:
        render = partial(_rendered, files)
    compared = lines(count, seed, _special_texts(files), render)
    with LlamaCppVocabulary(path) as reference, tqdm(total=len(compared), desc=name, unit="line") as progress:
        found = compare(files, reference, compared, progress).summary()
        roles = compare_roles(files, reference)
    facts = {key: stored.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")}
    passed = not found["unexplained"] and not roles["differences"]
    return {**facts, **found, "roles": roles, "passed": passed}


def small_vocabularies(texts: Sequence[str], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a small vocabulary for each known pre-tokenizer.

    Also for each variant of tokens that are merged by scores.

    texts: whose characters, and strings of characters, are tokens.
    """
    characters = sorted({character for text in texts for character in text})
    stored = byte_level("default", characters, seed)
    for pre in PRE_TOKENIZERS:
        yield pre, {**stored, "tokenizer.ggml.pre": pre}
    for name, stated in _SENTENCE_PIECE.items():
        yield name, sentence_piece(texts, seed, **stated)


def golden(seed: int) -> dict[str, Any]:
    """Return llama.cpp's tokens of a few lines, by small vocabulary.

    Also its end tokens of vocabularies with many.

    Vocabularies with the same tokens are joined.
    """
    found: dict[str, list[str]] = defaultdict(list)
    ends = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        for name, stored in small_vocabularies(GOLDEN_LINES, seed):
            with LlamaCppVocabulary(write_vocabulary(path, stored)) as reference:
                tokens = [reference.encode(text, add_special=True, parse_special=True) for text in GOLDEN_LINES]
            found[json.dumps(tokens)].append(name)
        for texts in END_TEXTS:
            stored = with_texts(byte_level("default", "ab", seed, num_longer=0), texts.split())
            with LlamaCppVocabulary(write_vocabulary(path, stored)) as reference:
                texts_of = stored["tokenizer.ggml.tokens"]
                ends[texts] = [texts_of[token] for token in reference.facts()["ends"]]
    return {
        "made by": f"polydraft analyze gguf-tokens --golden FILE --seed {seed}",
        "llama-cpp-python": packages.version("llama-cpp-python"),
        "seed": seed,
        "lines": list(GOLDEN_LINES),
        "tokens": [{"vocabularies": names, "ids": json.loads(tokens)} for tokens, names in found.items()],
        "ends": ends,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", type=Path, nargs="?", help="GGUF file; without one, small vocabularies alone are compared"
    )
    parser.add_argument("--lines", type=int, default=10_000, help="lines of the file (default: 10000)")
    parser.add_argument("--small-lines", type=int, default=1000, help="lines of each small vocabulary (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of lines and small vocabularies")
    parser.add_argument("--golden", type=Path, help="write llama.cpp's tokens of a few lines, for the tests, and end")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Compare a file, and small vocabularies of all pre-tokenizers.

    Raise ConfigError if llama.cpp is missing.
    """
    if options.lines < 1 or options.small_lines < 1:
        raise ConfigError("--lines and --small-lines must be at least 1")
    if options.golden is not None:
        options.golden.write_text(json.dumps(golden(options.seed)) + "\n")
        return {"files": {}, "passed": True}
    found: dict[str, Any] = {}
    if options.file is not None:
        found[options.file.name] = compare_file(options.file, options.lines, options.seed, options.file.name)
    one_of_each = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}
    with tempfile.TemporaryDirectory() as folder:
        for name, stored in small_vocabularies(small_texts(options.seed), options.seed):
            if name in PRE_TOKENIZERS and one_of_each[PRE_TOKENIZERS[name]] != name:
                continue
            path = write_vocabulary(Path(folder) / "small.gguf", stored)
            found[name] = compare_file(path, options.small_lines, options.seed, name)
    passed = all(one["passed"] for one in found.values())
    version = packages.version("llama-cpp-python")
    options.file = None if options.file is None else options.file.name
    names = ("file", "lines", "small_lines", "seed")
    return document(
        "tokens of GGUF files and of llama.cpp", options, names, llama_cpp_python=version, files=found, passed=passed
    )


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per vocabulary."""
    head = ["vocabulary", "lines", "tokens", "differences", "explained", "roles that differ"]
    rows = []
    for name, one in result["files"].items():
        num_found = sum(one["differences"].values())
        roles = ", ".join(one["roles"]["differences"]) or "none"
        rows.append([name, one["lines"], one["tokens"], num_found, num_found - one["unexplained"], roles])
    return table(head, rows)
