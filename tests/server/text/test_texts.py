"""The cost of text: calls that free the interpreter's lock, refusals before encoding, lanes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from engine.api import RequestError
from server.text.lanes import LONG
from server.text.text_bounds import longest_token
from server.text.tokenizer import Tokenizer
from server.wire.answers import raw_list
from tests.server.daemon_process import MODEL
from tests.server.text.spacing_tokenizers import spacing
from tests.server.tiny_models import TOKENIZER
from tests.wrong import calls_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(" \t\nab<>é\u0301ﬁＡ", max_size=60)


def loaded(inner: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """A tokenizer of the server around one of the library."""
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(str(folder))


def normalizing() -> tokenizers.Tokenizer:
    """A tokenizer that composes characters and makes several spaces one."""
    made = spacing("llama")
    steps = [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("  ", " ")]
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return made


@pytest.fixture(scope="module", params=["bytes", "llama", "normalizing"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Tokenizers of the common kinds."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        tokenizer = Tokenizer(str(TOKENIZER))
    else:
        tokenizer = loaded(normalizing() if request.param == "normalizing" else spacing("llama"), folder)
    yield tokenizer
    tokenizer.close()


@settings(deadline=None)
@given(text=TEXT, special=st.booleans())
def test_tokens_are_those_of_the_plain_call(tokenizer: Tokenizer, text: str, special: bool) -> None:
    """Encoding and decoding without the lock change no token and no text."""
    plain = tokenizer._backend.encode(text, add_special_tokens=special)
    assert tokenizer.encode(text, special) == plain.ids
    for skips in (False, True):
        assert tokenizer.decode(plain.ids, skips) == tokenizer._backend.decode(plain.ids, skip_special_tokens=skips)


@settings(deadline=None)
@given(text=TEXT)
def test_no_token_stands_for_more_than_the_bound(tokenizer: Tokenizer, text: str) -> None:
    """A text that is refused for its length has more tokens than the context."""
    most = tokenizer.longest_token
    assert most is not None
    assert len(text) <= most * len(tokenizer.encode(text, False))


def test_the_bound_is_not_larger_than_it_must_be(tokenizer: Tokenizer) -> None:
    """The longest piece of the vocabulary, times what a normalizer may join."""
    longest = max(map(len, tokenizer._backend.get_vocab(with_added_tokens=True)))
    assert tokenizer.longest_token in (longest, 8 * longest)


def unbounded(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer for which long texts may have few tokens."""
    made = spacing("llama")
    if kind == "strip":
        made.normalizer = normalizers.Strip()
    elif kind == "pattern":
        made.normalizer = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    elif kind == "removed":
        made.normalizer, made.pre_tokenizer = normalizers.Sequence([]), pre_tokenizers.Whitespace()
    elif kind == "split":
        made.pre_tokenizer = pre_tokenizers.Split("▁", "removed")
    elif kind == "added":
        made.add_tokens([tokenizers.AddedToken("<mark>", lstrip=True, normalized=False)])
    elif kind == "unknown":
        made = tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    elif kind == "dropped":
        made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    else:
        made = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return made


@pytest.mark.parametrize("kind", ["strip", "pattern", "removed", "split", "added", "unknown", "dropped", "word pieces"])
def test_a_tokenizer_that_drops_or_joins_text_has_no_bound(kind: str, tmp_path: Path) -> None:
    """None is refused unread there: a long text may fit."""
    tokenizer = loaded(unbounded(kind), tmp_path)
    filler = "b" if kind in ("unknown", "dropped", "word pieces") else " "
    text = "<mark>" if kind == "added" else ""
    long = filler * 2000 + text
    assert len(tokenizer.encode(long, False)) < 20, "long texts have many tokens here; the test proves nothing"
    assert tokenizer.longest_token is None
    tokenizer.close()


def test_truncation_of_the_file_is_not_applied(tmp_path: Path) -> None:
    """A tokenizer.json that truncates and pads must not shorten a prompt without a word."""
    inner = spacing("llama")
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    tokenizer = loaded(inner, tmp_path)
    assert 2 < len(tokenizer.encode("Hello there world", False)) < 50
    tokenizer.close()


class Watched:
    """A tokenizer of the library that notes which calls are made."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self._inner, name)


def test_no_call_holds_the_lock(tokenizer: Tokenizer) -> None:
    """The library holds the interpreter's lock for the time of a whole text."""
    watched = Watched(tokenizer._backend)
    with patch.object(tokenizer, "_backend", watched):
        tokens = asyncio.run(tokenizer.run_encode("a b", True))
        tokenizer.encode_words(["a"])
        tokenizer.decode(tokens)
    assert set(watched.called) == {"encode_batch_fast", "decode_batch"}


def test_a_text_that_cannot_fit_is_not_encoded(tokenizer: Tokenizer) -> None:
    """One character less is encoded and then refused by its tokens."""
    assert tokenizer.longest_token is not None
    limit = 10 * tokenizer.longest_token
    with calls_of(tokenizer, "encode") as calls, pytest.raises(RequestError) as refused:
        asyncio.run(tokenizer.run_encode("a" * (limit + 1), False, 10))
    assert not calls
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    assert f"{limit + 1} characters" in str(refused.value)
    with pytest.raises(RequestError, match=r"the prediction has \d+ tokens") as counted:
        asyncio.run(tokenizer.run_encode("b " * (limit // 2), False, 10, "prediction"))
    assert (counted.value.code, counted.value.param) == ("context_length_exceeded", "prediction")
    assert len(asyncio.run(tokenizer.run_encode("b" * (limit + 1), False))) > 10


def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer) -> None:
    """Twenty long ones begun before hold their lane; a short one is answered meanwhile."""
    free = threading.Event()

    async def calls() -> None:
        long = [asyncio.create_task(tokenizer.run(free.wait, size=LONG)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await tokenizer.run_encode("a b", False)
        assert not any(task.done() for task in long)
        free.set()
        await asyncio.gather(*long)

    asyncio.run(calls())


@settings(deadline=None)
@given(items=st.lists(st.integers() | TEXT), per_slice=st.integers(1, 5))
def test_sliced_json_is_plain_json(items: list[Any], per_slice: int) -> None:
    """A list written in slices reads as the list."""
    assert json.loads(bytes(raw_list(items, per_slice))) == items


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "word " * 500_000}),
        ("/v1/completions", {"prompt": ["a", "word " * 500_000]}),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "word " * 500_000}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 500_000}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 500_000}]}),
        ("/v1/responses", {"input": "word " * 500_000}),
    ],
)
def test_every_api_refuses_hopeless_texts_by_their_characters(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """The message counts characters, so no token was made of them."""
    answer = http.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "maximum context length" in error["message"]
    assert "characters" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_a_long_text_may_be_truncated_and_counted(http: httpx.Client) -> None:
    """With `truncate_prompt_tokens` no length is refused."""
    text = "word " * 100_000
    cut = {"model": MODEL, "prompt": text, "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert http.post("/v1/completions", json=cut).json()["usage"]["prompt_tokens"] == 5
    counted = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"]) > 100_000
    assert http.post("/detokenize", json={"tokens": counted["tokens"][1:]}).json()["prompt"] == text
    messages = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    assert http.post("/v1/messages/count_tokens", json=messages).json()["input_tokens"] > 100_000


def test_a_bound_is_read_from_every_tokenizer_at_hand() -> None:
    """The description of the embedded pair's tokenizer, as a file has it."""
    assert longest_token(json.loads((TOKENIZER / "tokenizer.json").read_text())) == 14
