import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import example, given
from hypothesis import strategies as st

from fixbin_jax.data.sources import documents
from fixbin_jax.data.tokenizers import (
    SentencePieceTokenizer,
    check_vocabulary,
    load_tokenizer,
    lost_characters,
    unicode_tokenizer,
)
from fixbin_jax.data.train_tokenizer import train_sentencepiece, train_tokenizer
from fixbin_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
UNICODE = unicode_tokenizer()
DISPLACED = [chr(i) for i in range(57_344, 57_348)]
AWKWARD = [
    "</s>",
    "<0x41>",
    "<pad>",
    "<unk>",
    "<reserved_55552>",
    "\0",
    "\r\n",
    "\ufeff",
    "ﬁ",
    "e\u0301",
    "🙂",
    "👩‍👩‍👧",
    "   ",
    "\t",
    "\u2028",
    "\u2581",
    " \u2581 ",
    "\u2585",
    "\ufffd",
    "\uffff",
    "\U0010ffff",
    *DISPLACED,
]
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from(AWKWARD))).map("".join)


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    source = [document.text for document in documents("python-docs")]
    return train_sentencepiece(source[:60], 600)


def layout(model: dict, specials=(), **parts) -> bytes:
    """The content of a tokenizer.json; specials are (content, id, special)."""
    added = [
        {
            "id": i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for content, i, special in specials
    ]
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return json.dumps(
        {"version": "1.0", "added_tokens": added, **rest, "decoder": None, "model": model, **parts}
    ).encode()


def letters(*tokens: str, **options) -> dict:
    vocab = {token: i for i, token in enumerate([*"abcd", *tokens])}
    return {"type": "BPE", "vocab": vocab, "merges": [], **options}


def load(folder, content: bytes, config: dict | None = None):
    (folder / "tokenizer.json").write_bytes(content)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


class TestUnicode:
    def test_the_id_of_a_character_is_its_code_point(self):
        code_points = [i for i in range(1 << 16) if not 0xD800 <= i < 0xE000 + 4]
        ids = UNICODE.encode("".join(map(chr, code_points)))
        assert ids.dtype == np.uint16
        np.testing.assert_array_equal(ids, code_points)

    @pytest.mark.parametrize("character", [*DISPLACED, "🙂", "\U00010000", "\U0010ffff"])
    def test_other_characters_are_spelt_in_bytes_from_55296(self, character):
        expected = [55_296 + byte for byte in character.encode("utf-8")]
        assert UNICODE.encode(character).tolist() == expected

    def test_facts(self):
        assert UNICODE.vocab_size == 65_536
        assert (UNICODE.pad_id, UNICODE.end_of_text_id) == (57_344, 57_346)
        assert UNICODE.dtype == np.uint16

    @given(TEXTS)
    @example("".join(AWKWARD))
    def test_every_text_comes_back_and_becomes_no_special(self, text):
        ids = UNICODE.encode(text)
        assert UNICODE.decode(ids) == text
        assert not np.isin(ids, range(57_344, 57_348)).any()
        assert not np.isin(ids, range(55_552, 57_344)).any()

    def test_specials_give_no_text(self):
        assert UNICODE.decode([57_345, 97, 57_346, 57_344, 98]) == "ab"

    @pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
    def test_a_lone_surrogate_is_refused_by_name(self, text):
        with pytest.raises(UserError, match=r"lone surrogate U\+D[8F][0F]{2} at character"):
            UNICODE.encode_batch(["fine", text])

    def test_a_long_text_has_the_ids_of_its_characters(self):
        text = "".join(random.Random(0).choices(["a", "\n", "é", "🙂"], k=600_000))
        short = {character: UNICODE.encode(character) for character in set(text)}
        expected = np.concatenate([short[character] for character in text])
        rows = UNICODE.encode_batch(["before", text, "behind"])
        np.testing.assert_array_equal(rows[1], expected)
        assert [UNICODE.decode(row) for row in rows] == ["before", text, "behind"]

    def test_the_file_is_an_ordinary_tokenizer_json(self, tmp_path):
        UNICODE.save(tmp_path)
        plain = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert plain.get_vocab_size() == 65_536
        assert sorted(plain.get_vocab().values()) == list(range(65_536))
        assert plain.encode("aé🙂\r\n").ids == UNICODE.encode("aé🙂\r\n").tolist()

    def test_transformers_loads_it_and_agrees(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        UNICODE.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "".join(AWKWARD)
        ids = theirs(text)["input_ids"]
        assert ids == UNICODE.encode(text).tolist()
        assert theirs.decode(ids) == text
        assert (theirs.pad_token_id, theirs.eos_token_id) == (57_344, 57_346)
        assert len(theirs) == 65_536
        assert set(theirs("a")) == {"input_ids", "attention_mask"}


class TestSavedAndLoaded:
    @pytest.mark.parametrize("name", ["unicode", "pieces"])
    def test_a_saved_tokenizer_is_the_same_when_loaded(self, tmp_path, name, pieces):
        ours = UNICODE if name == "unicode" else pieces
        ours.save(tmp_path / "new" / "folder")
        loaded = load_tokenizer(tmp_path / "new" / "folder")
        text = "".join(AWKWARD)
        np.testing.assert_array_equal(loaded.encode(text), ours.encode(text))
        for fact in ("fingerprint", "vocab_size", "end_of_text_id", "pad_id"):
            assert getattr(loaded, fact) == getattr(ours, fact)
        assert not [path for path in (tmp_path / "new" / "folder").iterdir() if "tmp" in path.name]

    def test_fingerprints_tell_tokenizers_apart(self, tmp_path, pieces):
        content = layout(letters("</s>", "<|endoftext|>"))
        one = load(tmp_path, content)
        other = load(tmp_path, content, {"eos_token": "<|endoftext|>"})
        assert len({t.fingerprint for t in (one, other, pieces, UNICODE)}) == 4
        assert unicode_tokenizer().fingerprint == UNICODE.fingerprint

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="file: tokenizer cannot be written"):
            UNICODE.save(tmp_path / "file")

    def test_the_files_themselves_can_be_named(self, tmp_path, pieces):
        UNICODE.save(tmp_path)
        pieces.save(tmp_path)
        assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size == 65_536
        assert load_tokenizer(str(tmp_path / "tokenizer.model")).vocab_size == 600

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("none", None, "none': No such file or directory, expected 'unicode'"),
            ("a.model", b"junk", "a.model: not a SentencePiece model"),
            ("a.model", b"", "a.model: not a SentencePiece model: the file is empty"),
            ("a.json", b"junk", "a.json: not a tokenizer.json"),
            ("a.json", b"\xff", "a.json: not a tokenizer.json"),
            ("a.json", b'{"model": 1}', "a.json: not a tokenizer.json"),
            ("", None, "folder without tokenizer.json or tokenizer.model"),
        ],
    )
    def test_what_is_no_tokenizer_is_refused_by_name(self, tmp_path, name, content, words):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            load_tokenizer(str(tmp_path / name))
        assert words in str(error.value)
        assert "\n" not in str(error.value)


class TestTokenizerJson:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (None, (4, 5)),
            ({}, (4, 5)),
            ({"eos_token": "d", "pad_token": {"content": "c"}}, (3, 2)),
            ({"eos_token": None, "pad_token": "a"}, (4, 0)),
        ],
    )
    def test_specials_come_from_the_config_or_from_known_names(self, tmp_path, config, expected):
        tokenizer = load(tmp_path, layout(letters("</s>", "<pad>")), config)
        assert (tokenizer.end_of_text_id, tokenizer.pad_id) == expected

    def test_an_added_special_goes_before_a_piece_spelt_like_one(self, tmp_path):
        content = layout(letters("</s>"), [("<|endoftext|>", 5, True)])
        assert load(tmp_path, content).end_of_text_id == 5

    def test_a_known_name_may_have_id_0(self, tmp_path):
        model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}
        tokenizer = load(tmp_path, layout(model))
        assert (tokenizer.end_of_text_id, tokenizer.pad_id) == (0, None)

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (None, "no end-of-text token found, expected one of </s>, "),
            ({"eos_token": "<end>"}, "eos_token '<end>' of tokenizer_config.json is not in"),
            ({"eos_token": 7}, "eos_token 7 of tokenizer_config.json is not in"),
            ([1], "tokenizer_config.json: not a JSON object"),
        ],
    )
    def test_an_unknown_end_of_text_is_refused_saying_where_to_name_it(
        self, tmp_path, config, words
    ):
        with pytest.raises(UserError) as error:
            load(tmp_path, layout(letters()), config)
        assert words in str(error.value)

    def test_the_vocabulary_ends_at_the_highest_id(self, tmp_path):
        model = letters("</s>")
        model["vocab"]["</s>"] = 70_000
        tokenizer = load(tmp_path, layout(model))
        assert tokenizer.vocab_size == 70_001
        assert tokenizer.dtype == np.uint32

    def test_no_text_is_cut_padded_or_encoded_at_random(self, tmp_path):
        cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        pad = {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
        model = letters("ab", "</s>", dropout=0.5)
        model["merges"] = [["a", "b"]]
        tokenizer = load(tmp_path, layout(model, truncation=cut, padding=pad))
        for _ in range(20):
            assert tokenizer.encode("abcab").tolist() == [4, 2, 4]

    def test_added_tokens_that_are_not_special_are_ordinary(self, tmp_path):
        specials = [("</s>", 4, True), ("cc", 5, False)]
        tokenizer = load(tmp_path, layout(letters("</s>"), specials))
        assert tokenizer.encode("acc").tolist() == [0, 5]

    def test_text_never_becomes_a_special_that_the_model_holds_as_a_piece(self, tmp_path):
        scores = {"<unk>": 0, "</s>": 0, "a": -1, "b": -1, "</": -5, "<": -6, "/": -6, "s>": -5}
        scores |= {"s": -6, ">": -6}
        model = {"type": "Unigram", "unk_id": 0, "vocab": list(scores.items())}
        tokenizer = load(tmp_path, layout(model, [("<unk>", 0, True), ("</s>", 1, True)]))
        for text in ["</s>", "a</s>b", "a" * 31 + "</s></s>" + "b" * 10, "</s>" * 9]:
            ids = tokenizer.encode(text)
            assert 1 not in ids
            assert "".join(list(scores)[i] for i in ids) == text
        assert tokenizer.encode("axb").tolist() == [2, 0, 3]

    def test_a_special_that_is_one_character_of_text_is_refused(self, tmp_path):
        tokenizer = load(tmp_path, layout(letters()), {"eos_token": "d"})
        with pytest.raises(UserError, match="the text 'd' is a special token"):
            tokenizer.encode("abd")

    def test_the_tokenizer_of_the_published_models(self, shared):
        tokenizer = load_tokenizer(shared / "tokenizers" / "bvv241-2-3")
        assert tokenizer.vocab_size == 65_536
        assert (tokenizer.pad_id, tokenizer.end_of_text_id) == (57_344, 57_346)
        for text in ["hello, world\r\n  é", "</s><think>[INST]", "\0\ufeff"]:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert not np.isin(ids, range(57_344, 57_367)).any()
        assert lost_characters(tokenizer, ["abc🙂"]) == 0.25


class TestSentencePiece:
    def test_facts(self, pieces):
        assert pieces.vocab_size == 600
        assert (pieces.pad_id, pieces.end_of_text_id) == (0, 1)
        assert pieces.encode("日").tolist() == [3 + byte for byte in "日".encode()]

    @given(text=TEXTS)
    @example(text="".join(AWKWARD))
    @example(text="def f(x):\n    return  x\r\n\t\n\n")
    def test_every_text_comes_back_and_becomes_no_special(self, pieces, text):
        ids = pieces.encode(text)
        assert pieces.decode(ids) == text
        assert not np.isin(ids, [0, 1, 2]).any()

    @given(texts=st.lists(TEXTS))
    def test_a_batch_is_its_texts_one_by_one(self, pieces, texts):
        for ids, text in zip(pieces.encode_batch(texts), texts, strict=True):
            np.testing.assert_array_equal(ids, pieces.encode(text))

    def test_it_compresses_the_text_it_was_trained_on(self, pieces):
        text = next(d.text for d in documents("python-docs") if "argparse" in d.origin)
        assert pieces.encode(text).size < 0.6 * len(text)

    def test_specials_give_no_text(self, pieces):
        assert pieces.decode([1, *pieces.encode(" a"), 0]) == " a"

    def test_training_repeats(self):
        texts = [random.Random(i).choice("abcde") * 3 + f" some words {i}\n" for i in range(300)]
        one, two = (train_sentencepiece(iter(texts), 320).fingerprint for _ in range(2))
        assert one == two

    @pytest.mark.parametrize("vocab_size", [-1, 10, 100_000])
    def test_a_size_that_cannot_be_is_refused(self, vocab_size):
        with pytest.raises(UserError, match=f"--vocab_size: {vocab_size}, SentencePiece refuses: "):
            train_sentencepiece(["some text"], vocab_size)

    def test_a_model_that_adds_a_space_is_left_as_it_is(self, tmp_path):
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["some words are here"] * 5),
            model_prefix=str(tmp_path / "a"),
            vocab_size=290,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
            hard_vocab_limit=False,
        )
        tokenizer = load_tokenizer(tmp_path / "a.model")
        assert tokenizer.pad_id is None
        assert tokenizer.decode(tokenizer.encode("some words")) == "some words"
        assert tokenizer.decode(tokenizer.encode("some\u2581words")) == "some words"


class TestTrainTokenizer:
    def test_it_writes_a_tokenizer_that_loads(self, tmp_path, capsys):
        (tmp_path / "a.jsonl").write_text('{"body": "some words, some more words"}\n' * 9)
        made = train_tokenizer(str(tmp_path / "a.jsonl"), 280, tmp_path / "out", text_field="body")
        assert load_tokenizer(tmp_path / "out").fingerprint == made.fingerprint
        assert "read 9 documents, 243 bytes" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["none.txt", "empty.txt", "bad.txt"])
    def test_a_source_without_text_is_refused_and_nothing_written(self, tmp_path, name):
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "bad.txt").write_bytes(b"\xff")
        with pytest.raises(UserError, match=name):
            train_tokenizer(str(tmp_path / name), 300, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_the_command_says_a_mistake_in_one_line(self, tmp_path):
        command = [sys.executable, "-m", "fixbin_jax.data.train_tokenizer"]
        flags = ["--input=none.txt", "--vocab_size=300", f"--output={tmp_path / 'out'}"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: source 'none.txt': no such file\n"


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes():
    check_vocabulary(UNICODE, 65_536)
    check_vocabulary(UNICODE, 70_000)
    with pytest.raises(UserError, match=r"65536 ids.*vocab_size, 300"):
        check_vocabulary(UNICODE, 300)


def test_lost_characters_are_counted(tmp_path, pieces):
    texts = ["Ab dD", "abcd", ""]
    lower = layout(letters("</s>", " "), normalizer={"type": "Lowercase"}, decoder={"type": "Fuse"})
    assert lost_characters(load(tmp_path, lower), texts) == 2 / 9
    assert lost_characters(UNICODE, [*texts, "".join(AWKWARD)]) == 0
    assert lost_characters(pieces, [*texts, "".join(AWKWARD)]) == 0
    assert lost_characters(UNICODE, []) == 0
