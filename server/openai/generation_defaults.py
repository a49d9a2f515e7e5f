"""Sampling defaults from a model's generation_config.json, with the bounds of requests."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from engine.api import ConfigError, model_file, read_object
from server.text.tokenizer import GenerationDefaults
from server.wire.fields import GenerationFields

log = logging.getLogger("polydraft")

_SERVED = frozenset(field.name for field in fields(GenerationDefaults))
# Values without effect on answers. None, false and empty values have no effect either.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    "max_length": 20,
}
_CHANGES_NOTHING = frozenset(
    """
    eos_token_id bos_token_id pad_token_id decoder_start_token_id transformers_version do_sample use_cache
    cache_implementation cache_config return_dict_in_generate return_legacy_cache output_attentions output_scores
    output_hidden_states output_logits is_assistant trust_remote_code
    """.split()
)


def generation_defaults(name: str, revision: str | None = None) -> GenerationDefaults:
    """Return a model's sampling defaults; neutral defaults if it has none.

    Raises ConfigError for values that requests may not have. `do_sample: false` means greedy, as in
    transformers. The log lists other fields as not applied.
    """
    path = model_file(name, "generation_config.json", revision)
    if path is None:
        return GenerationDefaults()
    stored = {field: value for field, value in read_object(path).items() if value is not None}
    wanted = {field: value for field, value in stored.items() if field in _SERVED}
    if stored.get("do_sample") is False:
        wanted["temperature"] = 0.0
    try:
        GenerationFields.model_validate({"model": "", **wanted})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: cannot be used ({field}: {first['msg']}, not {first['input']!r}); correct it, or start with "
            "--generation-config neutral"
        ) from error
    ignored = sorted(
        field
        for field, value in stored.items()
        if field[0] != "_" and field not in _SERVED | _CHANGES_NOTHING and value and value != _NEUTRAL.get(field)
    )
    if ignored:
        log.warning("%s: not applied: %s; send them with requests if they are served", path, ", ".join(ignored))
    return GenerationDefaults(**wanted)
