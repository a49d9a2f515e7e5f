"""A pair with realistic cost and known distributions: `python -m research.demo.bench_pair FOLDER`.

The models are real Llama and Qwen3 classes with random weights, and every layer is computed. The
layers' output projections are so small that the residual stream stays the token's embedding, and
the output head is built so that the logits after a token are a chosen table: a few likely
successors with given weights. The draft model gets a table that agrees with the target's to a
chosen degree, which sets the acceptance of a single draft. Used for tables of speed at any size,
and for checks of whole answers: the distribution of the next token is a function of the last token
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

_SMALL = 0.02
"""Factor of a layer's output in the residual stream."""
_LIKELIHOOD = 13.0
"""Logit of the likeliest successor; logits of the rest of the vocabulary are near 0."""
_ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """Shape of a model."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    model_type: str = "llama"


SIZES = {
    "125m": Size(768, 12, 2560, 12, 4),
    "draft": Size(256, 2, 512, 4, 2),
    "tiny": Size(128, 2, 192, 4, 2, head_dim=32),
    "0.6b": Size(1024, 28, 3072, 16, 8, head_dim=128, model_type="qwen3"),
    "1b": Size(2048, 16, 8192, 32, 8),
    "8b": Size(4096, 36, 12288, 32, 8, head_dim=128, model_type="qwen3"),
}


def successors(vocabulary: int, seed: int, count: int = 6) -> tuple[Tensor, Tensor]:
    """Return [V, count] likely next tokens of every token, and their distances.

    Differences of their logits from the likeliest token's.
    """
    generator = torch.Generator().manual_seed(seed)
    # Every column is a permutation, so that no token is likely everywhere.
    tokens_VS = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(count)], 1)
    below_VS = -torch.rand(vocabulary, count, generator=generator).cumsum(1)
    return tokens_VS, below_VS - below_VS[:, :1]


def disturbed(below_VS: Tensor, amount: float, seed: int) -> Tensor:
    """Return the same successors with other weights: a larger `amount` reduces the agreement."""
    generator = torch.Generator().manual_seed(seed)
    return below_VS + amount * torch.randn(below_VS.shape, generator=generator)


def random_model(
    size: Size,
    vocabulary: int,
    positions: int,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a model with random weights, whose layers have full strength."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **asdict(size),
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def build(
    size: Size,
    vocabulary: int,
    tokens_VS: Tensor,
    below_VS: Tensor,
    positions: int,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a model whose next-token logits are large at `tokens_VS`.

    They are `_LIKELIHOOD + below_VS` there, and near 0 elsewhere.
    """
    model = random_model(size, vocabulary, positions, seed, device, dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= _SMALL
        layer.mlp.down_proj.weight *= _SMALL
    embedding_VD = torch.randn(vocabulary, size.hidden_size, device=device)
    embedding_VD /= embedding_VD.norm(dim=1, keepdim=True)
    model.model.embed_tokens.weight.copy_(embedding_VD * size.hidden_size**0.5)
    write_head(model, tokens_VS, below_VS)
    return model


def write_head(model: Any, tokens_VS: Tensor, below_VS: Tensor) -> None:
    """Replace the table of a model from `build`."""
    width = model.config.hidden_size
    device = model.lm_head.weight.device
    tokens_VS, below_VS = tokens_VS.to(device), below_VS.to(device)
    embedding_VD = model.model.embed_tokens.weight.float() / width**0.5
    # The final norm returns a vector of length sqrt(D): a row of the head is a sum over the tokens
    # it follows. They are not quite orthogonal, so the error at the successors is added until it
    # vanishes.
    head_VD = torch.zeros_like(embedding_VD)
    wanted_VS = (_LIKELIHOOD + below_VS) / width**0.5
    for column in list(range(tokens_VS.shape[1])) * _ROUNDS:
        next_V = tokens_VS[:, column]
        missing_V = wanted_VS[:, column] - (head_VD[next_V] * embedding_VD).sum(1)
        head_VD.index_add_(0, next_V, embedding_VD * missing_V.unsqueeze(1))
    model.lm_head.weight.copy_(head_VD)


def acceptance(target: Any, draft: Any, temperature: float = 1.0, num_tokens: int = 512) -> float:
    """Return the mean over last tokens of sum min(p, q): the acceptance of a single draft."""
    with torch.inference_mode():
        highest = min(4000, target.config.vocab_size)
        last_N1 = torch.randint(highest // 13, highest, (num_tokens, 1), generator=torch.Generator().manual_seed(1))
        last_N1 = last_N1.to(target.device)
        logits = [model(input_ids=last_N1).logits[:, -1].float() for model in (target, draft)]
        target_probs_NV, draft_probs_NV = [(each / temperature).softmax(-1) for each in logits]
    return float(torch.minimum(target_probs_NV, draft_probs_NV).sum(-1).mean())


def make(
    size: str, draft_size: str, vocabulary: int, agreement: float, positions: int, **where: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return (target, draft, their description); where: device and dtype."""
    tokens_VS, below_VS = successors(vocabulary, seed=1)
    target = build(SIZES[size], vocabulary, tokens_VS, below_VS, positions, 2, **where)
    draft = build(SIZES[draft_size], vocabulary, tokens_VS, below_VS, positions, 4, **where)
    low, high = 0.0, 8.0
    for _ in tqdm(range(8), desc="finding the disturbance", unit="try"):
        amount = (low + high) / 2
        write_head(draft, tokens_VS, disturbed(below_VS, amount, 3))
        single_acceptance = acceptance(target, draft)
        low, high = (amount, high) if single_acceptance > agreement else (low, amount)
    about = {
        "parameters": {
            name: sum(p.numel() for p in m.parameters()) for name, m in (("target", target), ("draft", draft))
        },
        "single_draft_acceptance": single_acceptance,
        "vocabulary": vocabulary,
        "disturbance": amount,
    }
    return target, draft, about


def write(
    folder: Path,
    size: str,
    draft_size: str,
    vocabulary: int,
    agreement: float,
    positions: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Write target and draft with tokenizers into `folder`.

    Return their description, as written to pair.json.
    """
    target, draft, about = make(size, draft_size, vocabulary, agreement, positions, dtype=dtype)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name, vocabulary)
    (folder / "pair.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of synthetic words, one per token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a pair."""
    parser = argparse.ArgumentParser(prog="python -m research.demo.bench_pair", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where target/ and draft/ are written")
    parser.add_argument("--size", choices=SIZES, default="125m", help="of the target (default 125m)")
    parser.add_argument("--draft-size", choices=SIZES, default="draft", help="of the draft model")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens (default 16384)")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a single draft at temperature 1")
    parser.add_argument("--positions", type=int, default=32768, help="longest text")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the weights")
    options = parser.parse_args(arguments)
    about = write(
        options.folder,
        options.size,
        options.draft_size,
        options.vocabulary,
        options.acceptance,
        options.positions,
        getattr(torch, options.dtype),
    )
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
