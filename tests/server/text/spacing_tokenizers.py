"""Tokenizers that mark spaces, trained on a few words."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers


def spacing(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer that marks spaces, and whose decoder takes the one at the beginning of a text."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "llama":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=144, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(["Hello there world and all"] * 50, trainer)
    described = json.loads(made.to_str())
    vocab = described["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    return tokenizers.Tokenizer.from_str(json.dumps(described))
