"""Encodes and decodes text in a few threads, so that the event loop never waits.

Uses the tokenizers library and transformers' chat templates; neither loads torch. Long texts use
the library's batched calls, which release the interpreter's lock; `encode` and `decode` hold it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
from jinja2 import meta
from tokenizers.decoders import DecodeStream

from engine.api import TEMPLATE_FAILED, ConfigError, RequestError, check_source
from server.text.chat_variants import Messages
from server.text.content_forms import ContentForm, content_form
from server.text.lanes import Lanes, size_of_chat
from server.text.plain_messages import PlainMessages
from server.text.rendering import Objects, log_failure, render_conversation
from server.text.text_bounds import byte_characters, longest_token
from server.text.time_limit import TookTooLong, run_limited

Result = TypeVar("Result")

_REPLACEMENT = "\ufffd"
_encoder = msgspec.json.Encoder()
_BYTE_OF_CHARACTER = byte_characters()
_ALONE = "\u263a"
_SPACES = ("\u2581", "\u0120")


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults from the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer:
    """Tokenizer and chat template of a model."""

    def __init__(
        self,
        name: str,
        chat_template: str | None = None,
        revision: str | None = None,
        chat_limit_s: float = 10.0,
        has_plain_messages: bool = False,
    ) -> None:
        """Load from a folder, or a revision of a hub name; raises ConfigError if there is none.

        chat_limit_s: time to render a chat. has_plain_messages: special tokens that
        messages spell are text.
        """
        from transformers import PreTrainedTokenizerFast

        check_source(name, revision, is_model=False)
        try:
            self._fast: Any = PreTrainedTokenizerFast.from_pretrained(name, revision=revision)
        except Exception as error:  # the hub client and the parser raise many types
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{name}: no tokenizer could be loaded ({reason}); see --tokenizer") from error
        if chat_template is not None:
            self._fast.chat_template = chat_template
        self._backend = self._fast.backend_tokenizer
        # A tokenizer's file may request either, and encoding would then change a prompt silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Also special tokens without a role: decoding omits them as well.
        added = self._backend.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        self._special = frozenset(self._fast.all_special_ids) | special
        self._plain: PlainMessages | None = None
        if has_plain_messages:
            self._plain = PlainMessages(self._backend, self.chat_template)
        self._lanes = Lanes()
        self._chat_limit_s = chat_limit_s
        self._spelled: dict[int, tuple[str, bytes]] = {}

    async def run(self, call: Callable[..., Result], *args: Any, size: int = 0) -> Result:
        """Run a method of this tokenizer in its threads.

        size: number of characters, or of items that take as long.
        """
        return await asyncio.get_running_loop().run_in_executor(self._lanes.of(size), call, *args)

    async def run_answer(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run the encoding of a large answer in its own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._lanes.answers, call, *args)

    async def run_encode(
        self, text: str, add_special_tokens: bool, most: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text, encoded in the threads.

        Raises a RequestError about `param` for a text of more than `most` tokens, before encoding
        if the number of characters proves it.
        """
        self.check_length(text, most, param)
        return await self.run(self.encode, text, add_special_tokens, most, param, size=len(text))

    async def run_chat(
        self, messages: Sequence[dict[str, Any]], *args: Any, most: int | None = None, **options: Any
    ) -> list[int]:
        """Return the token ids of a chat, rendered in the threads for a limited time.

        Encoding does not count. Raises RequestError for more than `most` tokens.
        """
        content = _encoder.encode([messages, args, options])
        size = size_of_chat(len(content), content.count(b"{"))
        try:
            render = partial(self.render_chat, messages, *args, **options)
            text = await run_limited(self._lanes.of(size), self._chat_limit_s, render)
        except TookTooLong as error:
            limit = f"{self._chat_limit_s:g} s"
            message = f"the chat template took longer than {limit} for these messages; send fewer of them"
            raise RequestError(message, "messages") from error
        if self._plain is None:
            return await self.run_encode(text, False, most, "messages")
        self.check_length(self._plain.without_breaks(text), most, "messages")
        tokens = await self.run(self._plain.encode, text, size=len(text))
        if most is not None and len(tokens) > most:
            raise _too_long(most, f"{len(tokens)} tokens", "messages")
        return tokens

    def check_length(self, text: str, most: int | None, param: str) -> None:
        """Raise RequestError for a text whose length proves more than `most` tokens."""
        if most is not None and self.longest_token is not None and len(text) > most * self.longest_token:
            raise _too_long(most, f"{len(text)} characters", param)

    @cached_property
    def longest_token(self) -> int | None:
        """Maximum number of characters per token; None if this tokenizer has no bound."""
        return longest_token(msgspec.json.decode(self._backend.to_str()))

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text; raises RequestError for more than `most`."""
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoded) > most:
            raise _too_long(most, f"{len(encoded)} tokens", param)
        return list(encoded.ids)

    def encode_as_text(self, text: str, controls: frozenset[int]) -> list[int]:
        """Return the token ids of a text in which spellings of `controls` are ordinary text."""
        pieces = [text]
        while True:
            encoded = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
            tokens = [token for piece in encoded for token in piece.ids]
            if controls.isdisjoint(tokens):
                return tokens
            parts = [part for piece in pieces for part in self._split_controls(piece, controls)]
            if parts == pieces:
                # A control token of one character cannot be written as text.
                return [token for token in tokens if token not in controls]
            pieces = parts

    def _split_controls(self, text: str, controls: frozenset[int]) -> list[str]:
        """Return a text in parts that end within each control token that it spells."""
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=False)
        spans = zip(encoded.ids, encoded.offsets, strict=True)
        cuts = [start + 1 for token, (start, _) in spans if token in controls]
        parts = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        return [part for part in parts if part]

    def encode_inside(self, text: str, controls: frozenset[int]) -> list[int]:
        """Return the token ids of a text inside another one, without an added space.

        controls: added tokens whose spellings are ordinary text.
        """
        if not self._adds_space or not text:
            return self.encode_as_text(text, controls)
        # No vocabulary joins this character with others.
        before = self.encode(_ALONE, False)
        tokens = self.encode_as_text(_ALONE + text, controls)
        if tokens[: len(before)] != before:
            return self.encode_as_text(text, controls)
        return tokens[len(before) :]

    @cached_property
    def _adds_space(self) -> bool:
        first = self.encode("a", False)[:1]
        return bool(first) and self.token_text(first[0]).startswith(_SPACES)

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of words, at the beginning of a text and after a space."""
        encoded: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                encoded[tuple(self.encode(text, False))] = None
        return tuple(tokens for tokens in encoded if tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        documents: Sequence[dict[str, Any]] = (),
        call_marks: Sequence[str] = (),
    ) -> str:
        """Render a conversation with the model's chat template.

        continue_final_message: leave the last message open. variables: additional variables for the
        template. tools: functions that the model may call. documents: texts to answer from.
        call_marks: texts with which the model's calls may begin. Raises RequestError if the
        template omits a part of the conversation.
        """
        if not self._fast.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions, or start with --chat-template")
        if self._plain is not None:
            messages, tools, documents = map(self._plain.escaped, (messages, tools, documents))
            variables = self._plain.escaped(variables)
        plain_render: Callable[..., str] = partial(
            self._render,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **(variables or {}),
        )

        def render(messages: Messages, tools: Objects, documents: Objects) -> str:
            return plain_render(self._content_form.of(messages), tools, documents)

        try:
            return render_conversation(render, messages, tools, documents, call_marks)
        except RequestError as error:
            if error.code != TEMPLATE_FAILED:
                raise
            if not variables:
                log_failure(error.__cause__, messages, tools)
                raise
            self.render_chat(
                messages, add_generation_prompt, continue_final_message, None, tools, documents, call_marks
            )
            message = "chat_template_kwargs: the chat template fails with these values, and not without them"
            raise RequestError(message, "chat_template_kwargs") from error

    def _render(self, messages: Messages, tools: Objects, documents: Objects, **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not by `apply_chat_template`, which drops a content of None. Some templates show calls
        # only with None.
        ((text, *_), _) = render_jinja_template(
            [messages],
            list(tools) or None,
            list(documents) or None,
            self._fast.get_chat_template(tools=list(tools) or None),
            **{**self._fast.special_tokens_map, **options},
        )
        return str(text)

    @cached_property
    def _content_form(self) -> ContentForm:
        return content_form(partial(self._render, add_generation_prompt=True))

    def template_variables(self) -> frozenset[str]:
        """Return the names of the variables that the chat template reads and does not set."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(self._fast.get_chat_template()).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(self._fast.get_chat_template())))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return str(self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0])

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are special, such as one that ends a text."""
        return self._special

    def stored_setting(self, name: str) -> Any:
        """Return a value of tokenizer_config.json; None if it has none."""
        return self._fast.init_kwargs.get(name)

    def is_special(self, token: int) -> bool:
        """Return whether a token is special, such as one that ends a text."""
        return token in self._special

    def token_of(self, text: str) -> int | None:
        """Return the token with this text, or None."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def special_token(self, text: str) -> int | None:
        """Return the special token with this text, or None."""
        token = self.token_of(text)
        if token not in self._special:
            return None
        return token

    def special_texts(self, without: frozenset[int] = frozenset()) -> frozenset[str]:
        """Return the texts of all special tokens but those in `without`."""
        return frozenset(map(self.token_text, self._special - without)) - {""}

    def token_text(self, token: int) -> str:
        """Return a token's spelling in the vocabulary."""
        return str(self._backend.id_to_token(token))

    @cached_property
    def _before(self) -> list[int]:
        """Token of plain text before others, because many decoders drop a leading space."""
        return list(self._backend.encode("a", add_special_tokens=False).ids[-1:])

    def _decode_after(self, token: int) -> str:
        before = str(self._backend.decode(self._before, skip_special_tokens=False))
        both = str(self._backend.decode([*self._before, token], skip_special_tokens=False))
        if both.startswith(before):
            return both[len(before) :]
        return str(self._backend.decode([token], skip_special_tokens=False))

    def spell(self, token: int) -> tuple[str, bytes]:
        """Return a token's text after others, and its bytes, maybe a part of a character."""
        if token not in self._spelled:
            self._spelled[token] = self._new_spelling(token)
        return self._spelled[token]

    def _new_spelling(self, token: int) -> tuple[str, bytes]:
        text = self._decode_after(token)
        if _REPLACEMENT not in text:
            return text, text.encode()
        piece = self.token_text(token)
        if piece.startswith("<0x") and piece.endswith(">"):
            return text, bytes([int(piece[1:-1], 16)])
        try:
            return text, bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:
            return text, text.encode()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def describe(self) -> dict[str, Any]:
        """Return class, size, special tokens and template, for clients that tokenize."""
        description: dict[str, Any] = {
            "tokenizer_class": type(self._backend.model).__name__,
            "vocab_size": self.vocab_size,
        }
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = getattr(self._fast, name, None)
            description[name] = None if token is None else str(token)
        special = self._fast.special_tokens_map
        description["special_tokens"] = {name: str(token) for name, token in special.items()}
        description["chat_template"] = self._fast.chat_template
        return description

    @property
    def chat_template(self) -> str:
        """Chat template; "" if there is none."""
        return str(self._fast.chat_template or "")

    @property
    def response_template(self) -> dict[str, Any] | None:
        """Template for parsing the model's answers (transformers), if its tokenizer has one."""
        template = getattr(self._fast, "response_template", None)
        if not isinstance(template, dict):
            return None
        return template

    def detokenizer(self, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """Return a new incremental decoder of tokens that follow others.

        shown: special tokens that are not skipped, because a parser of the text needs them.
        """
        skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            skipped = self._special - shown
        return Detokenizer(self._backend, self._before, skipped)

    def special_in(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the special tokens of which these texts consist, next to ordinary tokens."""
        tokens = {token for text in texts for token in self.encode(text, False)}
        return frozenset(tokens & self._special)

    def close(self) -> None:
        """End the threads."""
        self._lanes.close()


def _too_long(most: int, length: str, param: str) -> RequestError:
    text = "prediction" if param == "prediction" else "prompt"
    message = f"This model's maximum context length is {most} tokens, but the {text} has {length}; shorten it"
    return RequestError(message, param, "context_length_exceeded")


class Detokenizer:
    """Incremental decoder of one answer; holds back partial UTF-8 characters."""

    def __init__(self, backend: Any, before: Sequence[int], skipped: frozenset[int]) -> None:
        """before: tokens of plain text before the answer. skipped: tokens without text."""
        self._backend = backend
        self._before = before
        self._skipped = skipped
        self._stream = self._new_stream()

    def _new_stream(self) -> DecodeStream:
        stream = DecodeStream(skip_special_tokens=False)
        for token in self._before:
            stream.step(self._backend, token)
        return stream

    def step(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        if token in self._skipped:
            return ""
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception as error:  # the library has no class for it
            if "Invalid prefix" not in str(error):
                raise
            # Invalid bytes change the decoding of earlier bytes, so decoding starts again after
            # them.
            self._stream = self._new_stream()
            return _REPLACEMENT + (self._stream.step(self._backend, token) or "")
