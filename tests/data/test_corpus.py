import hashlib
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixbin_jax.data.corpus import (
    TokenStream,
    encode_documents,
    is_held_out,
    read_corpus,
    unigram_entropy,
)
from fixbin_jax.data.sources import Document
from fixbin_jax.data.tokenizers import load_tokenizer
from fixbin_jax.errors import UserError

UNICODE = load_tokenizer("unicode")
END = 57_346


def write(path, texts) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def stream_of(texts) -> list[int]:
    return [i for text in texts for i in [*map(ord, text), END]]


def expected_side(text: str, fraction: float) -> bool:
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 2**64 < fraction


def some_texts(count: int) -> list[str]:
    return [f"document {i}: é\n" for i in range(count)]


def test_each_document_goes_whole_to_the_side_of_its_hash_end_of_text_behind_it(tmp_path):
    texts = some_texts(200)
    corpus = read_corpus(write(tmp_path / "a.jsonl", texts), UNICODE, 8, eval_fraction=0.2)
    held_out = [text for text in texts if expected_side(text, 0.2)]
    train = [text for text in texts if not expected_side(text, 0.2)]
    for stream, side in [(corpus.train, train), (corpus.held_out, held_out)]:
        assert stream.ids.dtype == np.uint16
        assert stream.ids.tolist() == stream_of(side)
        assert stream.documents == len(side)
        assert stream.text_bytes == sum(len(text.encode()) for text in side)
    assert corpus.split_rule == "document_hash"
    assert (corpus.bad_records, corpus.lost_characters) == (0, 0)


def test_the_held_out_share_is_the_fraction_and_grows_with_it():
    texts = some_texts(4000)
    shares = [{text for text in texts if is_held_out(text, f)} for f in (0.05, 0.2, 0.5)]
    for share, fraction in zip(shares, (0.05, 0.2, 0.5), strict=True):
        deviation = math.sqrt(fraction * (1 - fraction) / 4000)
        assert abs(len(share) / 4000 - fraction) < 4 * deviation
    assert shares[0] < shares[1] < shares[2]


def test_a_single_document_is_split_at_its_tail(tmp_path):
    text = "é🙂ab " * 100
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = read_corpus(str(tmp_path / "a.txt"), UNICODE, 16, eval_fraction=0.1)
    whole = [*UNICODE.encode(text).tolist(), END]
    assert corpus.split_rule == "tail"
    assert corpus.train.ids.tolist() + corpus.held_out.ids.tolist() == whole
    assert corpus.held_out.ids.size == round(0.1 * len(whole))
    assert corpus.train.text_bytes + corpus.held_out.text_bytes == len(text.encode())
    tail_text = UNICODE.decode(corpus.held_out.ids)
    assert corpus.held_out.text_bytes == len(tail_text.encode())
    # The cut goes through it.
    assert (corpus.train.documents, corpus.held_out.documents) == (1, 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    context=st.integers(1, 12),
    fraction=st.floats(0.01, 0.99),
)
def test_a_corpus_gives_both_sides_a_window_or_is_refused_with_both_numbers(
    tmp_path, lengths, context, fraction
):
    texts = [chr(97 + i) * length for i, length in enumerate(lengths)]
    source = write(tmp_path / "a.jsonl", texts)
    found, needed = sum(lengths) + len(lengths), 2 * (context + 1)
    if found < needed:
        with pytest.raises(UserError, match=rf"a\.jsonl': {found} ids, .* at least {needed} "):
            read_corpus(source, UNICODE, context, eval_fraction=fraction)
        return
    corpus = read_corpus(source, UNICODE, context, eval_fraction=fraction)
    assert min(corpus.train.ids.size, corpus.held_out.ids.size) >= context + 1
    assert corpus.train.ids.size + corpus.held_out.ids.size == found
    is_cut = corpus.split_rule == "tail" and corpus.train.ids[-1] != END
    assert corpus.train.documents + corpus.held_out.documents == len(lengths) + is_cut
    assert corpus.train.text_bytes + corpus.held_out.text_bytes == sum(lengths)


def test_an_eval_source_is_held_out_whole_and_nothing_else_is(tmp_path):
    train, held_out = some_texts(50), ["short"]
    corpus = read_corpus(
        write(tmp_path / "a.jsonl", train),
        UNICODE,
        16,
        eval_source=write(tmp_path / "b.jsonl", held_out),
    )
    assert corpus.split_rule == "eval_source"
    assert corpus.train.ids.tolist() == stream_of(train)
    assert corpus.held_out.ids.tolist() == stream_of(held_out)


def test_a_training_source_shorter_than_a_window_is_refused_with_both_numbers(tmp_path):
    source = write(tmp_path / "a.jsonl", ["abc"])
    with pytest.raises(UserError, match=r"a\.jsonl': 4 ids, expected at least 5"):
        read_corpus(source, UNICODE, 4, eval_source=source)
    assert read_corpus(source, UNICODE, 3, eval_source=source).train.ids.size == 4


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 5])
def test_a_fraction_that_is_no_share_is_refused(fraction):
    with pytest.raises(UserError, match="eval_fraction"):
        read_corpus("python-docs", UNICODE, 4, eval_fraction=fraction)


def test_a_source_without_documents_is_refused_saying_the_first_bad_record(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"empty\.txt': no document with any text$"):
        read_corpus(str(tmp_path / "empty.txt"), UNICODE, 4)
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n{}\n')
    with pytest.raises(UserError, match=r"a\.jsonl line 1: no field 'text', found \['body'\]$"):
        read_corpus(str(tmp_path / "a.jsonl"), UNICODE, 4, on_bad_record=lambda _: None)
    good = write(tmp_path / "good.jsonl", some_texts(9))
    with pytest.raises(UserError, match=r"empty\.txt': no document with any text$"):
        read_corpus(good, UNICODE, 4, eval_source=str(tmp_path / "empty.txt"))


def test_bad_records_are_counted_and_handed_on(tmp_path):
    texts = some_texts(50)
    (tmp_path / "a.jsonl").write_text("{}\nx\n" + json.dumps({"text": "".join(texts)}))
    bad = []
    corpus = read_corpus(str(tmp_path / "a.jsonl"), UNICODE, 4, on_bad_record=bad.append)
    assert corpus.bad_records == len(bad) == 2
    with pytest.raises(UserError, match="line 1"):
        read_corpus(str(tmp_path / "a.jsonl"), UNICODE, 4, strict=True)


def test_progress_ends_at_the_documents_and_bytes_of_the_source(tmp_path):
    texts = ["é" * 400_000, "b", "c" * 900_000, "d"]
    calls = []
    source = write(tmp_path / "a.jsonl", texts)
    read_corpus(source, UNICODE, 4, progress=lambda *now: calls.append(now))
    assert calls == sorted(calls)
    assert len(calls) == 2
    assert calls[-1] == (4, 1_700_002)


def test_documents_are_encoded_in_order_and_none_is_left_in_a_batch():
    texts = ["a" * 700_000, "b", "c" * 700_000, "d", "e"]
    batches = list(encode_documents([Document(text, text[0]) for text in texts], UNICODE))
    rows = [(document.text, ids) for batch in batches for document, ids in batch]
    assert [text for text, _ in rows] == texts
    for text, ids in rows:
        assert ids.dtype == np.uint16
        assert (ids[0], ids.size, ids[-1]) == (ord(text[0]), len(text) + 1, END)


@pytest.mark.parametrize(
    ("ids", "nats"),
    [
        ([3], 0.0),
        ([0, 1, 2, 3], math.log(4)),
        ([5, 5, 5, 2], 0.25 * math.log(4) + 0.75 * math.log(4 / 3)),
    ],
)
def test_unigram_entropy_is_that_of_the_frequencies(ids, nats):
    found = unigram_entropy(np.array(ids, np.uint16), 65_536)
    assert found == pytest.approx(nats, abs=1e-15)


def test_a_fingerprint_tells_streams_apart():
    ids = np.arange(9, dtype=np.uint16)
    other = ids.copy()
    other[4] += 1
    variants = [ids, other, ids.astype(np.uint32), ids[:-1]]
    prints = [TokenStream(variant, 1, 9).fingerprint for variant in variants]
    assert len(set(prints)) == 4
    assert TokenStream(ids.copy(), 0, 0).fingerprint == prints[0]
