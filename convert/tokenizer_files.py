"""A checkpoint's tokenizer as the files that transformers loads."""

import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers as hf

from fixbin_jax.data.tokenizers import SentencePieceTokenizer, Tokenizer
from fixbin_jax.errors import UserError

_SPACE = "\u2581"

# Text on which a converted tokenizer must agree with the one it was made from.
_PROOF = (
    "Plain words, numbers 12345 and (punctuation)!",
    "  leading,  doubled   and trailing spaces  ",
    "tabs\tand\nlines\r\n\r\nand\x00nul",
    "def f(x):\n    return {'a': [x, 1.5e-3]}  # comment",
    "é 日本語 🙂 ﬁ ǆ \u0301 mixed",
    "",
    " ",
)


def write(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, and a SentencePiece model beside them.

    Raises:
      UserError: a SentencePiece model that a tokenizer.json cannot express.
    """
    tokenizer.save(folder)
    settings: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        settings = json.loads(path.read_text())
    if isinstance(tokenizer, SentencePieceTokenizer):
        converted = _from_sentencepiece(folder / "tokenizer.model", tokenizer)
        converted.save(str(folder / "tokenizer.json"))
        settings |= {
            name: converted.id_to_token(id)
            for name, id in (
                ("eos_token", tokenizer.end_of_text_id),
                ("pad_token", tokenizer.pad_id),
            )
            if id is not None
        }
    # A text comes back as it was: transformers would otherwise take spaces before punctuation away.
    settings.setdefault("clean_up_tokenization_spaces", False)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings["model_max_length"] = context_length
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _from_sentencepiece(path: Path, tokenizer: SentencePieceTokenizer) -> hf.Tokenizer:
    """A BPE of the `tokenizers` library with the same ids."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i):
            continue
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(processor.get_score(i), pair) for pair in pairs]
    merges.sort(key=lambda merge: -merge[0])
    model = hf.models.BPE(
        vocab=vocab,
        merges=[pair for _, pair in merges],
        unk_token=pieces[processor.unk_id()] if processor.unk_id() >= 0 else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    converted = hf.Tokenizer(model)
    converted.normalizer = hf.normalizers.Replace(" ", _SPACE)
    converted.decoder = hf.decoders.Sequence(
        [hf.decoders.Replace(_SPACE, " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    )
    specials = [i for i in range(len(pieces)) if processor.is_control(i)]
    converted.add_special_tokens([pieces[i] for i in specials])
    for text in _PROOF:
        expected = tokenizer.encode(text).tolist()
        if converted.encode(text, add_special_tokens=False).ids != expected:
            raise UserError(
                f"{path.name}: as a tokenizer.json it would give {text!r} other ids; only BPE "
                "models without normalisation and dummy prefix can be written for transformers"
            )
    return converted
