"""Tokenizers behind one interface: text to ids and back.

A document's text never becomes a special token here, whatever it spells: the specials are put into
a stream by us alone.
"""

import abc
import collections
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import sentencepiece
import tokenizers as hf

from fixbin_jax.data import unicode
from fixbin_jax.errors import UserError

UNICODE = "unicode"

_JSON = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_MODEL = "tokenizer.model"

# What published tokenizers call these two, tried where tokenizer_config.json is silent.
_END_OF_TEXT_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")
_PAD_NAMES = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]")

# A longer text is cut where cuts change no id: the library keeps some 140 bytes a character.
_LONG_TEXT = 1 << 18

# SentencePiece writes a space as this character and decodes both to a space.
_SPACE_MARK = "\u2581"


def id_dtype(vocab_size: int) -> np.dtype:
    """The dtype that streams of ids are kept in: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      vocab_size: the highest id + 1.
      end_of_text_id: the id that closes a document in a stream.
      pad_id: the padding id, or None where the tokenizer has none.
      dtype: what `encode` returns, see `id_dtype`.
    """

    _main_file: ClassVar[str]

    def __init__(
        self, files: Mapping[str, bytes], vocab_size: int, end_of_text_id: int, pad_id: int | None
    ):
        """Takes what `save` writes, file name -> content, and the facts about the ids."""
        self._files = dict(files)
        self.vocab_size = vocab_size
        self.end_of_text_id = end_of_text_id
        self.pad_id = pad_id
        self.dtype = id_dtype(vocab_size)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 in hex of the serialised tokenizer and its end of text, which make a stream."""
        digest = hashlib.sha256(self._files[self._main_file])
        digest.update(str(self.end_of_text_id).encode())
        return digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text as [N] of `dtype`, no special added.

        Raises:
          UserError: if the text has a lone surrogate, which no encoding of text can hold.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, see `encode`."""
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError(
                    f"text to encode: lone surrogate U+{ord(text[error.start]):04X} at character "
                    f"{error.start}, expected valid Unicode"
                ) from error
        return self._encode_batch(texts)

    @abc.abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [N] below `vocab_size`; specials give no text."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into a folder, from which `load_tokenizer` reads it back.

        Raises:
          UserError: if the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._files.items():
                temporary = folder / f".{name}.tmp"
                temporary.write_bytes(content)
                temporary.replace(folder / name)
        except OSError as error:
            raise UserError(f"{folder}: tokenizer cannot be written: {error.strerror}") from error


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library."""

    _main_file = _JSON

    def __init__(self, serialised: bytes, config: bytes | None, origin: str):
        """Takes the content of tokenizer.json and of tokenizer_config.json beside it.

        Args:
          serialised: tokenizer.json.
          config: tokenizer_config.json, whose eos_token and pad_token name the two specials; where
            None, they are found by well-known names and a minimal one is made.
          origin: the path, for messages.

        Raises:
          UserError: if either does not parse, or the end of text is not known.
        """
        try:
            self._tokenizer = hf.Tokenizer.from_str(serialised.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{origin}: not a tokenizer.json: {error}") from error
        try:
            settings = dict(json.loads(config)) if config is not None else {}
        except (ValueError, TypeError) as error:
            beside = Path(origin).with_name(_CONFIG)
            raise UserError(f"{beside}: not a JSON object: {error}") from error
        end_of_text_id = self._special_id(settings, "eos_token", _END_OF_TEXT_NAMES, origin)
        if end_of_text_id is None:
            raise UserError(
                f"{origin}: no end-of-text token found, expected one of "
                f"{', '.join(_END_OF_TEXT_NAMES)}, or eos_token in {_CONFIG} beside it"
            )
        pad_id = self._special_id(settings, "pad_token", _PAD_NAMES, origin)
        if config is None:
            named = {"eos_token": end_of_text_id, "pad_token": pad_id}
            made = {
                key: self._tokenizer.id_to_token(i) for key, i in named.items() if i is not None
            }
            made["tokenizer_class"] = "PreTrainedTokenizerFast"
            config = json.dumps(made).encode("utf-8")

        # Files made for fine-tuning may cut, pad or drop merges at random; a corpus wants none.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True

        super().__init__(
            {_JSON: serialised, _CONFIG: config},
            vocab_size=max(self._tokenizer.get_vocab().values()) + 1,
            end_of_text_id=end_of_text_id,
            pad_id=pad_id,
        )
        layout = json.loads(serialised)
        self._by_character = _encodes_by_character(layout)
        self._specials = self._special_ids(layout["model"])

    def _special_id(
        self, settings: Mapping[str, Any], key: str, names: Iterable[str], origin: str
    ) -> int | None:
        token = settings.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            added = self._tokenizer.get_added_tokens_decoder()
            ids = [self._tokenizer.token_to_id(name) for name in names]
            known = [i for i in ids if i is not None]
            # A piece of an ordinary vocabulary may be spelt like a special.
            return min(known, key=lambda i: i not in added, default=None)
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise UserError(f"{origin}: {key} {token!r} of {_CONFIG} is not in its vocabulary")
        return found

    def _special_ids(self, model: Mapping[str, Any]) -> np.ndarray:
        added = self._tokenizer.get_added_tokens_decoder()
        specials = {i for i, token in added.items() if token.special}
        unknown = model.get("unk_id", self._tokenizer.token_to_id(model.get("unk_token") or ""))
        specials.discard(unknown)
        specials.add(self.end_of_text_id)
        if self.pad_id is not None:
            specials.add(self.pad_id)
        return np.array(sorted(specials), self.dtype)

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        whole = [text for text in texts if not self._too_long(text)]
        encodings = iter(self._tokenizer.encode_batch_fast(whole, add_special_tokens=False))
        rows = []
        for text in texts:
            if self._too_long(text):
                ids = self._encode_halves(text)
            else:
                ids = np.array(next(encodings).ids, self.dtype)
                # `encode_special_tokens` guards the added tokens, not the pieces of the model:
                # a Unigram model may hold "</s>" as a piece like any other.
                if np.isin(ids, self._specials).any():
                    ids = self._encode_halves(text)
            rows.append(ids)
        return rows

    def _too_long(self, text: str) -> bool:
        return self._by_character and len(text) > _LONG_TEXT

    def _encode_halves(self, text: str) -> np.ndarray:
        if len(text) == 1:
            raise UserError(
                f"tokenizer: the text {text!r} is a special token of its vocabulary, "
                "expected specials that no text becomes"
            )
        middle = len(text) // 2
        # One half at a time: both at once would hold the library's records of the whole text.
        first, second = (self._encode_batch([half])[0] for half in (text[:middle], text[middle:]))
        return np.concatenate([first, second])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See the base class."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _encodes_by_character(layout: Mapping[str, Any]) -> bool:
    """Whether each character is encoded by itself, so that a text may be cut anywhere."""
    model = layout["model"]
    beyond_one = (
        "merges",
        "ignore_merges",
        "fuse_unk",
        "continuing_subword_prefix",
        "end_of_word_suffix",
    )
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in beyond_one)
        and layout.get("normalizer") is None
        and layout.get("pre_tokenizer") is None
        and all(token["special"] for token in layout.get("added_tokens", ()))
    )


def unicode_tokenizer() -> HuggingFaceTokenizer:
    """The embedded tokenizer of 65,536 ids, see `fixbin_jax.data.unicode`."""
    return HuggingFaceTokenizer(unicode.tokenizer_json(), unicode.tokenizer_config(), UNICODE)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    _main_file = _MODEL

    def __init__(self, serialised: bytes, origin: str):
        """Takes the content of a .model file, and its path for messages.

        Raises:
          UserError: if it does not parse or has no end-of-text piece.
        """
        try:
            if not serialised:
                raise RuntimeError("the file is empty")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=serialised)
        except RuntimeError as error:
            raise UserError(f"{origin}: not a SentencePiece model: {error}") from error
        if self._processor.eos_id() < 0:
            raise UserError(
                f"{origin}: no end-of-text token found, expected a model with an eos_id"
            )
        pad_id = self._processor.pad_id()
        super().__init__(
            {_MODEL: serialised},
            vocab_size=self._processor.vocab_size(),
            end_of_text_id=self._processor.eos_id(),
            pad_id=None if pad_id < 0 else pad_id,
        )
        self._space_mark_ids = self._byte_ids(_SPACE_MARK)

    def _byte_ids(self, character: str) -> np.ndarray | None:
        """The byte pieces that spell a character, or None where cutting a text at it is not safe.

        It is not where the model has no byte pieces, or puts a space before every text.
        """
        processor = self._processor
        ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode("utf-8")]
        prefixed = processor.encode("a", out_type=str)[0].startswith(_SPACE_MARK)
        if prefixed or not all(processor.is_byte(i) for i in ids):
            return None
        return np.array(ids, self.dtype)

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        marked = self._space_mark_ids
        if marked is None or not any(_SPACE_MARK in text for text in texts):
            return [np.array(ids, self.dtype) for ids in self._processor.encode(list(texts))]
        rows = []
        for text in texts:
            pieces: list[np.ndarray] = []
            for ids in self._processor.encode(text.split(_SPACE_MARK)):
                pieces += [np.array(ids, self.dtype), marked]
            rows.append(np.concatenate(pieces[:-1]))
        return rows

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See the base class."""
        return self._processor.decode(np.asarray(ids).tolist())


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a name or path stands for.

    Args:
      name_or_path: "unicode", a tokenizer.json, a SentencePiece .model file, or a folder that holds
        tokenizer.json or tokenizer.model (the first is taken where both are there).

    Raises:
      UserError: if there is none, or it cannot be used.
    """
    if name_or_path == UNICODE:
        return unicode_tokenizer()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        found = [path / name for name in (_JSON, _MODEL) if (path / name).is_file()]
        if not found:
            raise UserError(f"tokenizer {str(path)!r}: folder without {_JSON} or {_MODEL}")
        path = found[0]
    try:
        serialised = path.read_bytes()
        if path.suffix == ".model":
            return SentencePieceTokenizer(serialised, str(path))
        config = path.with_name(_CONFIG)
        beside = config.read_bytes() if config.is_file() else None
    except OSError as error:
        raise UserError(
            f"tokenizer {str(name_or_path)!r}: {error.strerror}, expected {UNICODE!r}, a {_JSON}, "
            "a .model file or a folder with either"
        ) from error
    return HuggingFaceTokenizer(serialised, beside, str(path))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer with more ids than the model has.

    Raises:
      UserError: if `tokenizer.vocab_size` is above the model's `vocab_size`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"config.data.tokenizer: has {tokenizer.vocab_size} ids, expected at most "
            f"config.model.vocab_size, {vocab_size}"
        )


def lost_characters(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """The share of the characters of texts that encoding and decoding does not give back.

    Counted without regard to order; a text that comes back otherwise changed counts as one lost.
    """
    lost = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        decoded = tokenizer.decode(ids)
        if decoded != text:
            missing = collections.Counter(text) - collections.Counter(decoded)
            lost += max(1, missing.total())
    return lost / max(1, sum(map(len, texts)))
