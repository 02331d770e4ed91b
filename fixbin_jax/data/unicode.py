"""The embedded tokenizer of 65,536 ids in which a character's id is its code point.

An ordinary BPE of the `tokenizers` library, without merges. Characters above U+FFFF, and the four
private-use characters whose code points the specials take, have no entry and fall back to the byte
tokens <0x00> to <0xFF> at the head of the surrogate block, which no character owns. The rest of
that block holds names that no text can become, so that the vocabulary has no hole.
"""

import json
from typing import Any

_SPECIALS = {"<pad>": 57_344, "<s>": 57_345, "</s>": 57_346, "<unk>": 57_347}
_SURROGATES = range(0xD800, 0xE000)


def tokenizer_json() -> bytes:
    """The content of its tokenizer.json."""
    tokens = [chr(i) for i in range(1 << 16)]
    for i in _SURROGATES:
        byte = i - _SURROGATES.start
        tokens[i] = f"<0x{byte:02X}>" if byte < 256 else f"<reserved_{i}>"
    for token, special_id in _SPECIALS.items():
        tokens[special_id] = token
    layout: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": special_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, special_id in _SPECIALS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }
    return json.dumps(layout, ensure_ascii=False).encode("utf-8")


def tokenizer_config() -> bytes:
    """The content of its tokenizer_config.json, for transformers."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return json.dumps(config, indent=1).encode("utf-8")
