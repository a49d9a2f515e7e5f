"""Layouts of dialogues: templates in own words, with what is found about each at start.

`python -m tests.server.text.layouts` prints the table of docs/models.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from server.text.dialogue import Dialogue, dialogue_of
from server.text.shipped_templates import SHIPPED
from server.text.tokenizer import Tokenizer
from tests.server.call_spellings import SPELL, TEMPLATES, Call
from tests.server.tiny_models import TOKENIZER

DEFAULTS = {"on": "on", "off": "off", "left to the model": "as the model likes"}


@dataclass(frozen=True)
class Layout:
    """A layout; `models` have it."""

    name: str
    models: str
    calls: str | None
    tokens: tuple[str, ...] = ()
    """Tokens by which the format is found, or which end an answer."""
    shows_tools: bool = True

    def __str__(self) -> str:
        return self.name

    def file(self) -> Path:
        """The template, which comes with the server or the tests."""
        return SHIPPED.get(self.name) or TEMPLATES / "families" / f"{self.name}.jinja"

    def tokenizer(self) -> Tokenizer:
        """The embedded pair's tokenizer with the template."""
        tokenizer = Tokenizer(str(TOKENIZER), self.file().read_text())
        if self.tokens:
            tokenizer._backend.add_tokens([AddedToken(token, normalized=False) for token in self.tokens])
        return tokenizer

    def answer(self, dialogue: Dialogue, is_open: bool, thought: str, text: str, calls: Sequence[Call]) -> str:
        """An answer as the model writes it; is_open: the prompt has opened the thoughts."""
        spelled = SPELL[self.calls](list(calls)) if calls and self.calls else ""
        if self.name == "solar_open":
            begin = "<|begin|>assistant"
            called = begin + spelled if spelled else ""
            return f"<|think|>{thought}<|end|>{begin}<|content|>{text}<|end|>{called}"
        if self.name == "kimi-k3":
            return (
                f"{thought}<|close|>think<|sep|><|open|>response<|sep|>{text}<|close|>response<|sep|>{spelled}"
                "<|close|>message<|sep|>"
            )
        marks = dialogue.thoughts
        if marks is None or not thought:
            return text + spelled
        return f"{'' if is_open else marks.open}{thought}{marks.close}{text}{spelled}"

    def documented(self, dialogue: Dialogue) -> str:
        """The row of docs/models.md."""
        marks, switch = dialogue.thoughts, dialogue.thinking
        calls = "refused" if dialogue.tools_refusal else f"`{dialogue.call_format}`"
        thoughts = f"`{marks.open.strip()}`".replace("|", "\\|") if marks else ""
        default = DEFAULTS[switch.default] if marks else ""
        off = f"`{switch.off}`" if switch.off is not None else ""
        efforts = ", ".join(f"{effort} {switch.word_of(effort)}" for effort in switch.efforts)
        return f"| {self.models} | {calls} | {thoughts} | {default} | {off} | {efforts} |".replace("  ", " ")


LAYOUTS = (
    Layout("qwen3", "Qwen3", "hermes"),
    Layout("qwen38", "Qwen3.8", "qwen3_coder"),
    Layout("step35", "Step 3.5, 3.7", "qwen3_coder"),
    Layout("glm47", "GLM-4.7", "glm"),
    Layout("glm52", "GLM-5.2", "glm"),
    Layout("mistral_small4", "Mistral Small 4", "mistral_v11"),
    Layout("gemma4", "Gemma 4", "gemma4", ("<|tool_response>",)),
    Layout("kimi_k25", "Kimi K2 Thinking, K2.5", "kimi_k2"),
    Layout("kimi-k3", "Kimi K3 (`kimi-k3`)", "kimi_k3"),
    Layout("lfm2", "LFM2", "lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    Layout("lfm25", "LFM2.5", "lfm2"),
    Layout("nemotron_nano2", "Nemotron Nano v2", "nemotron_v2"),
    Layout("falcon_h1", "Falcon-H1", "falcon_h1"),
    Layout("minimax_m2", "MiniMax M2", "minimax_m2"),
    Layout("minimax_m3", "MiniMax M3", "minimax_m3"),
    Layout("deepseek31-tools", "DeepSeek V3.1 (`deepseek31-tools`)", "deepseek_v31"),
    Layout("deepseek32", "DeepSeek V3.2 (`deepseek32`)", "deepseek_v32"),
    Layout("deepseek4", "DeepSeek V4 (`deepseek4`)", "deepseek_v4"),
    Layout("hy3", "Hy3", "hy3_opensource"),
    Layout("solar_open", "Solar Open", "solar_open"),
    Layout("llama4", "Llama 4", "pythonic"),
    Layout("smolvlm", "SmolVLM, Idefics 3", None, shows_tools=False),
    Layout("llava", "LLaVA", None, shows_tools=False),
)

if __name__ == "__main__":
    for one in LAYOUTS:
        print(one.documented(dialogue_of(one.tokenizer(), "auto", "auto")))
