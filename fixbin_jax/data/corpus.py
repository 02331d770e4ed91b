"""A corpus held in memory: documents as two streams of ids, for training and held out."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fixbin_jax.data.sources import BadRecord, BadRecordHandler, Document, documents, log_bad_record
from fixbin_jax.data.tokenizers import Tokenizer, lost_characters
from fixbin_jax.errors import UserError

# How a held-out stream was chosen.
BY_DOCUMENT_HASH = "document_hash"
BY_TAIL = "tail"
BY_EVAL_SOURCE = "eval_source"

# Enough characters for the tokenizer libraries to keep their threads busy.
_BATCH_CHARACTERS = 1 << 20
# What is looked at to tell whether a tokenizer loses text.
_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 1 << 12

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other, the end-of-text id behind each.

    Attributes:
      ids: [N], uint16 or uint32.
      documents: how many documents it holds, one that a cut goes through counting on either side.
      text_bytes: the UTF-8 bytes of the text it spells.
    """

    ids: np.ndarray
    documents: int
    text_bytes: int

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the ids and their dtype, in hex."""
        digest = hashlib.sha256(self.ids.dtype.str.encode())
        digest.update(self.ids.data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on and is judged by.

    Attributes:
      train: the stream to train on.
      held_out: the stream that training never sees.
      split_rule: "document_hash", "tail" or "eval_source", see `read_corpus`.
      bad_records: how many records were skipped.
      lost_characters: the share of the characters of a sample of the training text that the
        tokenizer does not give back.
    """

    train: TokenStream
    held_out: TokenStream
    split_rule: str
    bad_records: int
    lost_characters: float


def read_corpus(
    source: str,
    tokenizer: Tokenizer,
    context: int,
    *,
    text_field: str = "text",
    strict: bool = False,
    eval_source: str | None = None,
    eval_fraction: float = 0.05,
    on_bad_record: BadRecordHandler = log_bad_record,
    progress: Progress | None = None,
) -> Corpus:
    """Reads and encodes a source into a stream for training and one held out.

    Held out is `eval_source` where it is given (rule "eval_source"); else the documents chosen by
    `is_held_out` (rule "document_hash"); else, where that leaves either side with less than one
    window of `context` + 1 ids, the last `eval_fraction` of all ids, at least one window (rule
    "tail"; `text_bytes` of the tail are those of what it decodes to).

    Args:
      source: see `sources.documents`, as are `text_field`, `strict` and `on_bad_record`.
      tokenizer: encodes the documents.
      context: the length of a window in ids.
      eval_source: a source for the held-out stream alone.
      eval_fraction: the share to hold out, above 0 and below 1.
      progress: called after each batch with the documents and UTF-8 bytes of the source so far.

    Raises:
      UserError: if a source cannot be read, gives no document, or is shorter than its windows.
    """
    if not 0 < eval_fraction < 1:
        raise UserError(f"eval_fraction: found {eval_fraction}, expected above 0 and below 1")
    tally, eval_tally = _Tally(on_bad_record), _Tally(on_bad_record)
    found = documents(source, text_field, strict=strict, on_bad_record=tally)
    sample = list(itertools.islice(found, _SAMPLE_DOCUMENTS))
    lost = lost_characters(tokenizer, [document.text[:_SAMPLE_CHARACTERS] for document in sample])
    found = itertools.chain(sample, found)
    encoded = _encode_all(found, tokenizer, eval_fraction, progress)
    _require_documents(source, encoded, tally)

    window = context + 1
    if eval_source is not None:
        rule = BY_EVAL_SOURCE
        found = documents(eval_source, text_field, strict=strict, on_bad_record=eval_tally)
        eval_encoded = _encode_all(found, tokenizer, eval_fraction, progress)
        _require_documents(eval_source, eval_encoded, eval_tally)
        train, held_out = _joined(encoded), _joined(eval_encoded)
        _require_ids(source, train.ids.size, window, f"one window of context {context} + 1")
    else:
        rule = BY_DOCUMENT_HASH
        train = _joined([document for document in encoded if not document.held_out])
        held_out = _joined([document for document in encoded if document.held_out])
        if min(train.ids.size, held_out.ids.size) < window:
            rule = BY_TAIL
            whole = _joined(encoded)
            windows = f"a training and a held-out window of context {context} + 1"
            _require_ids(source, whole.ids.size, 2 * window, windows)
            train, held_out = _split_tail(whole, tokenizer, eval_fraction, window)
    return Corpus(train, held_out, rule, tally.count + eval_tally.count, lost)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out share: a function of its text alone.

    It does where the first 8 bytes of its text's blake2b, read as a number in [0, 1), are below
    `fraction`.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[list[tuple[Document, np.ndarray]]]:
    """Yields batches of documents, each with its ids [N + 1], the last being the end of text."""
    end_of_text = np.array([tokenizer.end_of_text_id], tokenizer.dtype)

    def encoded(batch: list[Document]) -> list[tuple[Document, np.ndarray]]:
        rows = tokenizer.encode_batch([document.text for document in batch])
        return [
            (document, np.concatenate([ids, end_of_text]))
            for document, ids in zip(batch, rows, strict=True)
        ]

    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield encoded(batch)
            batch, characters = [], 0
    if batch:
        yield encoded(batch)


def unigram_entropy(ids: np.ndarray, vocab_size: int) -> float:
    """Entropy of the frequencies of ids, in nats per id: H = -sum_v p_v ln p_v, p_v = n_v / N.

    The loss of the best model that knows only how often each id occurs in this very stream.

    Args:
      ids: [N], integers below `vocab_size`, N at least 1.
      vocab_size: the number of ids there are.
    """
    counts_V = np.bincount(ids, minlength=vocab_size)
    p = counts_V[counts_V > 0] / ids.size
    return float(-np.sum(p * np.log(p)))


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    ids: np.ndarray
    text_bytes: int
    held_out: bool


class _Tally:
    """Counts bad records on their way to a handler and keeps the first."""

    def __init__(self, handler: BadRecordHandler):
        self._handler = handler
        self.count = 0
        self.first: BadRecord | None = None

    def __call__(self, record: BadRecord) -> None:
        self.count += 1
        self.first = self.first or record
        self._handler(record)


def _encode_all(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    eval_fraction: float,
    progress: Progress | None,
) -> list[_Encoded]:
    encoded: list[_Encoded] = []
    total_bytes = 0
    for batch in encode_documents(documents, tokenizer):
        for document, ids in batch:
            text_bytes = len(document.text.encode("utf-8"))
            total_bytes += text_bytes
            held_out = is_held_out(document.text, eval_fraction)
            encoded.append(_Encoded(ids, text_bytes, held_out))
        if progress is not None:
            progress(len(encoded), total_bytes)
    return encoded


def _joined(encoded: Sequence[_Encoded]) -> TokenStream:
    rows = [document.ids for document in encoded] or [np.empty(0, np.uint16)]
    text_bytes = sum(document.text_bytes for document in encoded)
    return TokenStream(np.concatenate(rows), len(encoded), text_bytes)


def _require_documents(source: str, encoded: Sequence[_Encoded], tally: _Tally) -> None:
    if not encoded:
        reason = f"; first bad record: {tally.first}" if tally.first else ""
        raise UserError(f"source {source!r}: no document with any text{reason}")


def _require_ids(source: str, found: int, needed: int, what: str) -> None:
    if found < needed:
        raise UserError(f"source {source!r}: {found} ids, expected at least {needed} for {what}")


def _split_tail(
    whole: TokenStream, tokenizer: Tokenizer, fraction: float, window: int
) -> tuple[TokenStream, TokenStream]:
    size = whole.ids.size
    cut = size - max(window, min(round(fraction * size), size - window))
    head, tail = whole.ids[:cut], whole.ids[cut:]
    tail_documents = int(np.count_nonzero(tail == tokenizer.end_of_text_id))
    is_cut = cut > 0 and head[-1] != tokenizer.end_of_text_id
    head_documents = whole.documents - tail_documents + int(is_cut)
    tail_bytes = len(tokenizer.decode(tail).encode("utf-8"))
    return (
        TokenStream(head, head_documents, whole.text_bytes - tail_bytes),
        TokenStream(tail, tail_documents, tail_bytes),
    )
