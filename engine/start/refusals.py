"""Types of models that are not served, with what is missing, and the nearest served type.

A type that gets in is removed here and listed in `architectures.py`; docs/models.md has both lists.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

REASONS = {
    "layers without K and V between others": "mllama",
    "recurrent layers of another kind": "minimax recurrent_gemma rwkv xlstm zamba zaya",
    "an indexer that chooses the keys of a token": """
        axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm5_next glm_moe_dsa hy_v4 minimax_m3_vl
        minimax_m3_vl_text qwen4_exp qwen4_exp_text
    """,
    "a bias by distance, or a convolution, in the attention": """
        bloom falcon inkling2 inkling2_text inkling_mm_model inkling_text mpt
    """,
    "attention without transformers' interface": """
        codegen cpmant gpt-sw3 gpt_neo gpt_neox_japanese gptj openai-gpt xglm
    """,
    "attention of another kind": "blt diffllama doge hrm_text reformer xlnet",
    "a window that only transformers' cache has": "moshi",
    "a text model of another class than the plain family": """
        chameleon cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni deepseek_ocr2 emu3 ernie4_5_vl_moe
        glm_ocr granite4_vision granite_docling molmo2 muse_glimmer muse_spark paddleocr_vl qwen2_5_omni
        qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker unlimited_ocr
    """,
    "a test of its text model next to the whole wrapper": """
        blip-2 deepseek_vl_hybrid fast_vlm fuyu hyperclovax_vision_v2 idefics2 instructblip instructblipvideo janus
        llava_next_video ovis2 perception_lm pp_chart2table qianfan_ocr shieldgemma2 video_llava
        vipllava aria
    """,
    "a causal language model of its text in transformers": "mistral4 mistral_large4 step3p7",
    "attention to another text or to images": "evolla git idefics kosmos-2 kosmos-2.5",
    "a drafter's place next to its target": "gemma4_assistant gemma4_unified_assistant",
    "a causal language model: this is an encoder, or a decoder of an encoder-decoder": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blip camembert data2vec-text
        diffusion_gemma electra ernie florence2 marian mbart megatron-bert moss_transcribe_diarize musicgen
        musicgen_melody mvp pegasus pi0 pix2struct plbart pp_formulanet prophetnet rembert roberta
        roberta-prelayernorm roc_bert roformer t5gemma2 trocr udop vision-encoder-decoder whisper xlm xlm-roberta
        xlm-roberta-xl xmod
    """,
}
"""Types that are not served, by what is missing for them."""
_LEAST_ALIKE = 0.7
"""Likeness of two names from which one is worth naming."""


def refusal(model_type: str, served: Collection[str]) -> str:
    """Return why a type is not served, and the nearest served type, for a message."""
    missing = next((why for why, types in REASONS.items() if model_type in types.split()), "")
    reason = f"missing is {missing}" if missing else "it is not known to give right logits here"
    nearest = get_close_matches(model_type, served, n=1, cutoff=_LEAST_ALIKE)
    shown = f"; the nearest served type is {nearest[0]}" if nearest else ""
    return f"architecture {model_type!r} is not served: {reason}{shown} (docs/models.md lists all types)"
