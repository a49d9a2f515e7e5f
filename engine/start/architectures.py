"""Reads transformers configurations, and refuses architectures that would be served wrongly.

Some architectures run through the attention hook without an exception but compute wrong logits
(layers with other state, encoders). So there is a list of supported families here, and a probe
of every model (`probe.py`).
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError, first_line
from engine.models.files import check_source
from engine.models.importing import import_transformers
from engine.models.wrappers import text_config
from engine.start.refusals import refusal

RECURRENT_MODEL_TYPES = frozenset(
    """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2
    nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba2
    """.split()
)
"""Families with recurrent layers or short convolutions."""
# Families whose logits through the hook equal plain transformers, by
# tests/models/test_architectures.py. The text model of each wrapper in `models/wrappers.py` is of a
# type in this list.
FITTING_MODEL_TYPES = RECURRENT_MODEL_TYPES | frozenset(
    """
    llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 gpt_neox gpt2 opt olmo2
    afmoe apertus arcee axk1 bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4
    flex_olmo gemma gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_bigcode gpt_oss
    granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe internlm3 jais2 jetmoe laguna llama4_text longcat_flash
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mixtral modernbert-decoder nanochat olmo
    olmo3 olmoe persimmon phi phimoe qwen2_moe qwen3_moe seed_oss smollm3 starcoder2 vaultgemma youtu
    aria_text beam biogpt cohere2_moe ctrl dbrx dots1 exaone_moe flint granite_swa granitemoe_swa granitemoeshared
    hy_v3 hyperclovax iquestcoder kolibri1 mellum nemotron solar_open stablelm
    """.split()
)


def read_config(name: str, revision: str | None) -> Any:
    """Return the transformers configuration of a model, or of a wrapper's text model.

    Raise ConfigError if it cannot be read.
    """
    check_source(name, revision)
    try:
        config = import_transformers().AutoConfig.from_pretrained(name, revision=revision)
        return text_config(name, config)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"{name}: no readable transformers config: {first_line(error)}") from error


def check_config(name: str, config: Any) -> None:
    """Raise ConfigError for an architecture that would be served wrongly."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: an encoder-decoder model ({config.model_type}); only causal LMs are served")
    if config.model_type not in FITTING_MODEL_TYPES:
        raise ConfigError(f"{name}: {refusal(config.model_type, FITTING_MODEL_TYPES)}")


def check_ranks(name: str, config: Any, num_ranks: int) -> None:
    """Raise ConfigError for a model with recurrent layers that is to be split."""
    if num_ranks > 1 and config.model_type in RECURRENT_MODEL_TYPES:
        raise ConfigError(
            f"{name}: {config.model_type} has recurrent layers, which are not split; leave --tensor-parallel-size out"
        )
