"""llama.cpp as a peer of the bench: a GGUF file is decoded by llama.cpp's library.

A Llama checkpoint in transformers format is written as GGUF first. Optional: needs
llama-cpp-python, which nothing else uses. Not for: serving.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.gguf.folder import file_of

AS_IT_IS = "file"
"""Type of the weights of a GGUF file, which is not converted."""
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types of all matrices; vectors are float32. llama.cpp's own tool stores the head of a q4_0 model
in more bits.
"""
_ERROR = 3
"""Level of llama.cpp's log."""
NUM_CHECKED = 3
"""Prompts whose greedy answers are compared first."""
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@contextlib.contextmanager
def gguf_of(folder: Path, kind: str) -> Iterator[Path]:
    """Yield the GGUF file of a model's folder.

    kind: `AS_IT_IS` for a file's folder, else one of `TYPES`, as which the checkpoint is written.
    Raises ConfigError.
    """
    file = file_of(folder)
    known = TYPES if file is None else (AS_IT_IS,)
    if kind not in known:
        names = ", ".join(known)
        raise ConfigError(f"{folder.name}: llama.cpp reads this model as {names}, not {kind}; change --llama-cpp-types")
    if file is not None:
        yield file
        return
    with tempfile.TemporaryDirectory() as place:
        write_gguf(folder, Path(place) / "model.gguf", kind)
        yield Path(place) / "model.gguf"


def check_library() -> None:
    """Raise ConfigError if llama.cpp's library is not installed."""
    if find_spec("llama_cpp") is None:
        raise ConfigError("llama.cpp's library is not installed; run pip install llama-cpp-python, or leave it out")


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write a Llama checkpoint of one safetensors file as GGUF without a vocabulary; kind: one of
    `TYPES`.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama", "only checkpoints like Llama are supported"
    weights = load_file(folder / "model.safetensors")
    num_heads = config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, weight: Tensor) -> None:
        values = weight.float().numpy()
        numbers = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind.upper()]
        writer.add_tensor(name, gguf.quants.quantize(values, numbers), raw_dtype=numbers)

    for name, weight in weights.items():
        if "q_proj" in name:
            weight = _interleaved(weight, num_heads)
        elif "k_proj" in name:
            weight = _interleaved(weight, num_kv_heads)
        add(_gguf_name(name), weight)
    if "lm_head.weight" not in weights:
        add("output.weight", weights["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    number, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{_NAMES[part]}.weight"


def _interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows: rotation pairs neighbours in GGUF, and the halves of a head in transformers."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _log(level: int, text: bytes, _: Any) -> None:
    """Log errors only: loading a model writes a line per tensor."""
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Context:
    """A loaded model with room for several sequences."""

    def __init__(
        self, file: Path, num_sequences: int, num_tokens: int, num_threads: int, is_precise: bool = False
    ) -> None:
        """file: GGUF; num_tokens: most tokens of one sequence; is_precise: with K/V in float32, and
        without flash attention, which on a CPU adds more than a per cent to perplexities.
        """
        import llama_cpp

        self._api = llama_cpp
        self._log = llama_cpp.llama_log_callback(_log)  # the library holds no reference
        llama_cpp.llama_log_set(self._log, None)
        wanted = llama_cpp.llama_model_default_params()
        wanted.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), wanted)
        assert self._model, "llama.cpp cannot load the model"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = num_sequences * num_tokens
        options.n_seq_max = num_sequences
        options.n_batch = max(512, num_tokens)
        options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = num_threads
        if is_precise:
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        assert self._context, "llama.cpp cannot make a context"
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def forget(self, sequence: int | None = None, start: int = 0) -> None:
        """Drop a sequence's K/V from a position on, or everything."""
        if sequence is None:
            self._api.llama_memory_clear(self._memory, True)
        else:
            self._api.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run one pass over (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.logits[i] = int(wanted)
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"

    def logits(self, text: Sequence[int]) -> Tensor:
        """Return [T - 1, V] logits after all tokens of a text but the last."""
        self.forget()
        self.decode([(token, i, 0, True) for i, token in enumerate(text[:-1])])
        size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        rows = self._api.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(rows, shape=(len(text) - 1, size)).copy())

    def sampler(self, temperature: float, seed: int) -> Any:
        """Return llama.cpp's own sampling chain."""
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if temperature:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        return chain

    def sample(self, sampler: Any, index: int) -> int:
        """Sample a token from the logits of the last pass's `index`-th token."""
        return int(self._api.llama_sampler_sample(sampler, self._context, index))


class LlamaCpp:
    """llama.cpp's decoding of a target, or of a pair, as an arm of `peers`."""

    def __init__(self, options: Any, kind: str) -> None:
        """kind: type of the weights, one of `TYPES` or `AS_IT_IS`."""
        room = options.prompt + options.tokens + 8
        sequences = max(NUM_CHECKED, *options.concurrency)
        self._num_tokens = options.tokens
        with gguf_of(Path(options.target), kind) as file:
            self._target = Context(file, sequences, room, options.threads)
        self._draft: Context | None = None
        if options.draft is not None:
            with gguf_of(Path(options.draft), kind) as file:
                self._draft = Context(file, 1, room, options.threads)
        self._seed = 0

    def plain(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
        """Decode all prompts in one batch."""
        target = self._target
        target.forget()
        samplers = [self._sampler(temperature) for _ in prompts]
        answers: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            last = len(prompt) - 1
            target.decode([(token, i, number, i == last) for i, token in enumerate(prompt)])
            answers.append([target.sample(samplers[number], last)])
        for step in range(self._num_tokens - 1):
            target.decode(
                [(answer[-1], len(prompts[number]) + step, number, True) for number, answer in enumerate(answers)]
            )
            for number, answer in enumerate(answers):
                answer.append(target.sample(samplers[number], number))
        return answers

    def drafted(self, prompts: Sequence[Sequence[int]], temperature: float, num_drafts: int = 3) -> list[list[int]]:
        """Decode one prompt after the other, with the draft model's likeliest tokens as drafts; a
        draft is accepted if it is the sampled token.
        """
        return [self._drafted(prompt, temperature, num_drafts) for prompt in prompts]

    def _drafted(self, prompt: Sequence[int], temperature: float, num_drafts: int) -> list[int]:
        target, draft = self._target, self._draft
        assert draft is not None
        target.forget()
        draft.forget()
        sampler = self._sampler(temperature)
        likeliest = draft.sampler(0.0, 0)
        last = len(prompt) - 1
        target.decode([(token, i, 0, i == last) for i, token in enumerate(prompt)])
        text = [*prompt, target.sample(sampler, last)]
        num_drafted = 0
        while len(text) < len(prompt) + self._num_tokens:
            missing = text[num_drafted:]
            draft.decode([(token, num_drafted + i, 0, i == len(missing) - 1) for i, token in enumerate(missing)])
            drafts = [draft.sample(likeliest, len(missing) - 1)]
            while len(drafts) < num_drafts:
                draft.decode([(drafts[-1], len(text) + len(drafts) - 1, 0, True)])
                drafts.append(draft.sample(likeliest, 0))
            start = len(text) - 1
            target.decode([(token, start + i, 0, True) for i, token in enumerate([text[-1], *drafts])])
            for i, token in enumerate([*drafts, None]):
                text.append(target.sample(sampler, i))
                if text[-1] != token:
                    break
            target.forget(0, len(text) - 1)
            num_drafted = min(len(text) - 1, start + num_drafts)
            draft.forget(0, num_drafted)
        return text[len(prompt) :][: self._num_tokens]

    def _sampler(self, temperature: float) -> Any:
        self._seed += 1
        return self._target.sampler(temperature, self._seed)
