"""The model families whose dialogues are tested, and what each refuses.

Templates (`templates/families/`) have the structure of the published ones, in other words.
Tokenizers are built like the published ones: byte-level, or pieces with a sign for spaces and
tokens of single bytes; marks are added tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from server.text.shipped_templates import SHIPPED
from server.text.text_bounds import byte_characters
from tests.server.call_spellings import CALLS_BEGIN, CALLS_END, END, SPELL, TEMPLATES, Call
from tests.server.scripted_model import CUT, added_token, byte_level, write_answers

NO_TOOLS = "has no place for tools"
NO_CALLS = "does not show calls"
NOT_SHOWN = "does not show it"
ARGUMENTS = {"city": "Paris", "days": 12}
ONE: list[Call] = [("weather", ARGUMENTS)]
TWO: list[Call] = [("rain", {"town": "Rome", "hours": 34}), ("sum", {"left": "Oslo", "right": 56})]
"""Other names, because each part of a script should occur once (`scripted_model.py`)."""
JSON_ANSWER = '{"city":"Bonn"}'


@dataclass(frozen=True)
class Free:
    """Parts of an enforced call that are not the only text that its grammar allows."""

    begin: str
    end: str
    text_end: str = '"'
    """After a string."""
    after_name: str = ""
    before_value: str = ""
    """Forced text that may be in one token with a value."""


_FUNCTION = "<|channel|>commentary to=functions."
FREE = {
    "hermes": Free("<tool_call>", "}}\n</tool_call>"),
    "llama3_json": Free("{", "}}"),
    "mistral": Free("[TOOL_CALLS]", "}}]"),
    "mistral_v11": Free("[TOOL_CALLS]", "}", after_name="[ARGS]"),
    "tool_call_list": Free("<|tool_call|>", "}}]"),
    "deepseek_v3": Free(CALLS_BEGIN, f"}}\n```{END}{CALLS_END}"),
    "qwen3_coder": Free("<tool_call>", "\n</parameter></tool_call>", "\n</parameter>", before_value=">\n"),
    "glm": Free("<tool_call>", "</arg_value></tool_call>", "</arg_value>", before_value="<arg_value>"),
    "harmony": Free(_FUNCTION, "}", after_name=" <|constrain|>json<|message|>"),
}


@dataclass(frozen=True)
class Family:
    """A family; `refused` has a part of the answer by row, if the row is refused."""

    name: str
    tokens: Mapping[str, bool]
    """Added tokens, and whether they are special; the ends are special ones."""
    ends: tuple[str, ...]
    calls: str | None
    """Format of calls; None if tools are refused."""
    template: str = ""
    """A template that comes with the server; "" is the family's, in `templates/families/`."""
    has_pieces: bool = False
    """The tokenizer has pieces with a sign for spaces, and not bytes as letters."""
    begin: str = ""
    thoughts: Literal["none", "tags", "opened", "channel"] = "none"
    """Thoughts between tags, in tags that the prompt opens, or in a channel (harmony)."""
    most_calls: int | None = None
    """Largest number of calls in an answer."""
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def expected_refusal(self, row: str) -> str:
        """A part of the answer to a row that is refused; "" if it is answered."""
        return self.refused.get(row, "")

    def documented(self) -> str:
        """The family's row in docs/models.md."""
        calls = f"`{self.calls}`" if self.calls else "refused"
        calls += ", enforced" if not any(self.expected_refusal(row) for row in ("forced", "strict")) else ""
        thoughts = "" if self.thoughts == "none" else "read"
        history = "refused" if "history" in self.refused else "shown"
        template = f"`{self.template}`" if self.template else ""
        return f"| {self.name.removesuffix('_with_tools')} | {template} | {calls} | {history} | {thoughts} |"

    def template_text(self) -> str:
        """The chat template with which the family is served."""
        return (SHIPPED[self.template] if self.template else self.own_template()).read_text()

    def own_template(self) -> Path:
        """The file with the family's own template."""
        return TEMPLATES / "families" / f"{self.name.removesuffix('_with_tools')}.jinja"

    def answers(self) -> dict[str, str]:
        """Scripts by mark: of several marks in a prompt the last one of this table counts."""
        if self.thoughts == "channel":
            return _harmony_answers(self._enforced)
        spell = SPELL[self.calls or "hermes"]
        opening = "<think>\n" if self.thoughts == "tags" else ""
        thought = f"{opening}First this.\n</think>\n\n" if self.thoughts != "none" else ""
        before_json = f"{opening}Hm.\n</think>" if self.thoughts != "none" else ""
        # A mark that is text is the only text that a forced call may begin with.
        begins = FREE[self.calls or "hermes"].begin
        forced = [begins] if self.tokens.get(begins) else []
        either = ["{", '"', "n"] if self.calls == "llama3_json" else []
        # The mark of a call is text in a thought.
        before_call = f"{opening}Hm <tool_call>.\n</think>" if self.thoughts != "none" else ""
        thinks_before = before_json if self.thoughts == "opened" else ""
        return {
            "«plain»": f"{thinks_before}It is fine in Zürich, 東京 😀.",
            "«thought»": f"{thought}Then that.",
            # Scripts for grammars have only the text that is free.
            "«schema»": before_json + 'Bonn"}',
            "«system»": f"{thinks_before}As the system says.",
            "«call»": thinks_before + spell(ONE),
            # Another white space than elsewhere in the calls, so that it occurs once.
            "«two»": thinks_before + spell(TWO).replace("</tool_call>\n<tool_call>", "</tool_call>\n\n<tool_call>"),
            # Another white space, so that each thought occurs once.
            "«forced»": before_json.replace("Hm.", "Hm.\n") + self._enforced("weather", "Lima", 90, forced),
            "«named»": before_json.replace("Hm.", "\nHm.") + self._enforced("", "Nice", 55, forced),
            "«strict»": before_call + self._enforced("rain", "Lyon", 41),
            "«either»": thinks_before + self._enforced("sum", "Bern", 77, either or None),
            # DeepSeek's prompts open no thoughts after results.
            "«history»": "You asked before.",
            "«result»": "It has twelve degrees.",
        }

    def _enforced(self, name: str, text: str, number: int, begin: Sequence[str] | None = None) -> str:
        """Script of a call whose text a grammar enforces: what it leaves free.

        name: "" if there is no choice. begin: by default the text that begins calls.
        """
        free = FREE[self.calls or "hermes"]
        # The last piece of text has the whole tag, so that only a mark follows it.
        digits = CUT.join(str(number)) if self.calls == "qwen3_coder" else str(number)
        values = [f"{free.before_value}{value}" for value in (text + free.text_end, digits + free.end)]
        pieces = [*(begin if begin is not None else [free.begin]), name, free.after_name, *values]
        return CUT.join(filter(None, pieces))


def _harmony_answers(enforced: Callable[[str, str, int], str]) -> dict[str, str]:
    """Messages in channels; one call ends a turn."""

    def said(text: str) -> str:
        return f"<|channel|>final<|message|>{text}"

    def called(name: str, arguments: dict[str, Any], **spelling: Any) -> str:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return f"{head}{json.dumps(arguments, **spelling)}<|call|>"

    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    return {
        "«plain»": said("It is fine in Zürich, 東京 😀."),
        "«thought»": thought.replace("Hm.", "First this.") + said("Then that."),
        "«schema»": thought + said('Bonn"}'),
        "«system»": said("As the system says."),
        "«call»": called(*ONE[0]),
        "«two»": called(*TWO[0]),
        "«forced»": thought.replace("Hm.", f"H{CUT}m.") + enforced("weather", "Lima", 90),
        "«named»": thought.replace("Hm.", f"Hm{CUT}.") + enforced("", "Nice", 55),
        "«strict»": enforced("rain", "Lyon", 41),
        "«either»": enforced("sum", "Bern", 77),
        "«history»": said("You asked before."),
        "«result»": said("It has twelve degrees."),
    }


def _marks(special: str, plain: str = "") -> dict[str, bool]:
    return dict.fromkeys(special.split(), True) | dict.fromkeys(plain.split(), False)


_CHATML = "<|im_start|> <|endoftext|>"
_CALL = "<tool_call> </tool_call>"
_QWEN = _marks(_CHATML, _CALL)
_THINK = _marks("", "<think> </think>")
_DEEPSEEK = _marks(
    "<｜begin▁of▁sentence｜>",
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>",
)
_GEMMA = _marks("<bos> <start_of_turn>", "<b> </b> <h1> <table>")
_WITHOUT_TOOLS = dict.fromkeys(("call", "two", "forced", "named", "strict", "schema_or_call"), NO_TOOLS)
_WITHOUT_HISTORY = dict.fromkeys(("turn_2_null", "turn_2_empty", "turn_2_text", "history"), NOT_SHOWN)
_ALTERNATES = dict.fromkeys(_WITHOUT_HISTORY, "refuses these messages")

FAMILIES = (
    Family("qwen2_5", _QWEN, ("<|im_end|>", "<|endoftext|>"), "hermes"),
    Family("qwen3", _QWEN | _THINK, ("<|im_end|>", "<|endoftext|>"), "hermes", thoughts="tags"),
    Family("qwen3_coder", _QWEN, ("<|im_end|>", "<|endoftext|>"), "qwen3_coder"),
    Family(
        "llama3",
        _marks("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|> <|end_of_text|>"),
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        "llama3_json",
        begin="<|begin_of_text|>",
    ),
    Family(
        "mistral_v3",
        _marks("<s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"),
        ("</s>",),
        "mistral",
        has_pieces=True,
        begin="<s>",
    ),
    Family(
        "mistral_v11",
        _marks(
            "<s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
            "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [CALL_ID] [ARGS]"
        ),
        ("</s>",),
        "mistral_v11",
        begin="<s>",
    ),
    Family(
        "gemma2", _GEMMA, ("<end_of_turn>", "<eos>"), None, has_pieces=True, begin="<bos>",
        refused=_WITHOUT_TOOLS | _ALTERNATES,
    ),
    Family(
        "gemma3", _GEMMA, ("<end_of_turn>", "<eos>"), None, has_pieces=True, begin="<bos>",
        refused=_WITHOUT_TOOLS | _ALTERNATES,
    ),
    Family(
        "gemma3_with_tools", _GEMMA, ("<end_of_turn>", "<eos>"), "hermes", "gemma-tools", has_pieces=True, begin="<bos>"
    ),
    Family(
        "phi4_mini",
        _marks("<|system|> <|user|> <|assistant|> <|endoftext|>", "<|tool|> <|/tool|> <|tool_call|> <|/tool_call|>"),
        ("<|end|>", "<|endoftext|>"),
        "tool_call_list",
    ),
    Family(
        "deepseek_v3", _DEEPSEEK, ("<｜end▁of▁sentence｜>",), None, begin="<｜begin▁of▁sentence｜>",
        refused=_WITHOUT_TOOLS,
    ),
    Family(
        "deepseek_v3_with_tools", _DEEPSEEK, ("<｜end▁of▁sentence｜>",), "deepseek_v3", "deepseek-tools",
        begin="<｜begin▁of▁sentence｜>",
    ),
    Family(
        "deepseek_r1_distill", _DEEPSEEK | _THINK, ("<｜end▁of▁sentence｜>",), None, begin="<｜begin▁of▁sentence｜>",
        thoughts="opened", refused=_WITHOUT_TOOLS,
    ),
    Family(
        "glm4",
        _marks("[gMASK] <sop> <|system|> <|assistant|>", f"{_CALL} <arg_key> </arg_key> <arg_value> </arg_value>")
        | _THINK,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "glm",
        thoughts="tags",
    ),
    Family(
        "gpt_oss",
        _marks("<|startoftext|> <|start|> <|channel|> <|message|> <|end|> <|constrain|>", "analysis final assistant"),
        ("<|return|>", "<|call|>"),
        "harmony",
        thoughts="channel",
        most_calls=1,
    ),
    Family("smollm2", _marks(_CHATML), ("<|im_end|>",), None, refused=_WITHOUT_TOOLS | _WITHOUT_HISTORY),
    Family("smollm2_with_tools", _marks(_CHATML), ("<|im_end|>",), "hermes", "chatml-tools"),
    Family(
        "granite3",
        _marks("<|start_of_role|> <|end_of_role|> <|tool_call|>"),
        ("<|end_of_text|>",),
        "tool_call_list",
    ),
)  # fmt: skip


def write_family(folder: Path, family: Family) -> Path:
    """Write the family's model, which answers as `Family.answers` says."""
    folder.mkdir(parents=True)
    tokens = {"<unk>": True, **family.tokens, **dict.fromkeys(family.ends, True)}
    tokenizer = _pieces_tokenizer(list(tokens)) if family.has_pieces else _byte_tokenizer()
    tokenizer["added_tokens"] = [added_token(token, special) for token, special in tokens.items()]
    spell = (lambda text: text.replace(" ", "▁")) if family.has_pieces else byte_level
    numbers = write_answers(folder, tokenizer, spell, family.answers(), family.ends[0])
    ends = [numbers[end] for end in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    named = {"eos_token": family.ends[0], "unk_token": "<unk>"} | ({"bos_token": family.begin} if family.begin else {})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(family.own_template().read_text())
    return folder


def _byte_tokenizer() -> dict[str, Any]:
    """Like those of Qwen, Llama 3 and most others: the letters of bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {letter: number for number, letter in enumerate(byte_characters())}
    return _bpe(vocabulary, normalizer=None, pre_tokenizer=level, decoder=level, post_processor=level)


def _pieces_tokenizer(tokens: list[str]) -> dict[str, Any]:
    """Like those of Mistral and Gemma: a sign for spaces, and tokens of single bytes.

    tokens: added tokens, which stand in the vocabulary.
    """
    letters = tokens + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(33, 127))]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    return _bpe(vocabulary, normalizer=spaces, pre_tokenizer=None, decoder=decoder, post_processor=None)


def _bpe(vocabulary: dict[str, int], **parts: Any) -> dict[str, Any]:
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "fuse_unk": True,
        "end_of_word_suffix": None, "byte_fallback": "<0x00>" in vocabulary, "ignore_merges": False,
        "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "model": model, **parts}
