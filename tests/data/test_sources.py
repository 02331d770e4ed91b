import errno
import gzip
import json
import logging
import os
import random
import sysconfig
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixbin_jax.data.sources import PYTHON_DOCS, BadRecord, Document, documents
from fixbin_jax.errors import UserError


def texts(source, **options) -> list[str]:
    return [document.text for document in documents(str(source), **options)]


def read(source, **options) -> tuple[list[Document], list[BadRecord]]:
    bad: list[BadRecord] = []
    return list(documents(str(source), on_bad_record=bad.append, **options)), bad


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\r\n", "a\r\nb\r\n"),
        (b"a\rb\n\n  c", "a\rb\n\n  c"),
        (b"\0a\0", "\0a\0"),
        ("é日🙂ﬁ\u2028x\u0085".encode(), "é日🙂ﬁ\u2028x\u0085"),
        (b"\xef\xbb\xbfa\xef\xbb\xbfb", "a\ufeffb"),
        (b" \n", " \n"),
    ],
)
def test_plain_text_is_kept_as_it_stands_but_for_the_encoding_mark(tmp_path, data, text):
    (tmp_path / "a.txt").write_bytes(data)
    assert texts(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_files_yield_nothing(tmp_path, name, data):
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(tmp_path / name) == ([], [])


def test_a_glob_reads_its_files_in_order_of_path(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ["b.txt", "a.md", "c.jsonl", "d/e.txt"]:
        (tmp_path / name).write_text(f'{{"text": "{name}"}}' if "json" in name else name)
    assert texts(tmp_path / "*") == ["a.md", "b.txt", "c.jsonl"]
    assert texts(tmp_path / "**" / "*.txt") == ["b.txt", "d/e.txt"]


def test_a_source_may_list_several_in_order(tmp_path):
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts(f"{tmp_path}/b.txt, {tmp_path}/a.txt") == ["b", "a"]


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "a1.txt").write_text("two")
    assert texts(tmp_path / "a[1].txt") == ["one"]


def test_any_fsspec_file_system_can_be_read():
    with fsspec.open("memory://folder/a.txt", "wb") as file:
        file.write(b"far away")
    assert texts("memory://folder/*.txt") == ["far away"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}/none.txt", "none.txt': no such file"),
        ("{}/*.txt", "*.txt': the pattern matches no file"),
        ("{}", "is a directory, expected a file or a glob such as"),
        ("", "source ''"),
        ("{}/a.md,", "source ''"),
        ("nowhere://a.txt", "nowhere"),
        ("{}/a\0b", "cannot be read"),
    ],
)
def test_a_source_that_names_no_file_is_refused(tmp_path, source, words):
    (tmp_path / "a.md").write_text("a")
    with pytest.raises(UserError) as error:
        texts(source.format(tmp_path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unreadable_file_is_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("a")
    local = type(fsspec.filesystem("file"))

    def refuse(self, path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(local, "_open", refuse)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: Permission denied"):
        texts(path)


@pytest.mark.parametrize(
    ("data", "byte"), [(b"abc\xff", 3), (b"\xff\xfea\0", 0), (b"\xef\xbb\xbfab\xed\xa0\x80", 5)]
)
@pytest.mark.parametrize("strict", [False, True])
def test_plain_text_that_is_not_utf8_is_refused_with_file_and_byte(tmp_path, data, byte, strict):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.txt: byte {byte} is 0x{data[byte]:02x}"):
        texts(tmp_path / "a.txt", strict=strict)


GOOD_LINE = b'{"text": "good", "id": 1}'
BAD_LINES = {
    b'{"text": null}': "field 'text' is null",
    b'{"other": "x"}': "no field 'text', found ['other']",
    b'{"text": 3}': "field 'text' is number",
    b'{"text": "a\xff"}': "byte 11 of the line is not UTF-8",
    b'{"text": "a"': "not JSON",
    b'{"text": "\\ud800"}': "lone surrogate at character 0",
    b'["text"]': "found a JSON array",
    b'"text"': "found a JSON string",
    b"null": "found a JSON null",
    b"not json": "not JSON",
    b"[" * 100_000: "not JSON",
    b'{"text": "a\0"}': "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=list(BAD_LINES.values()))
def test_a_bad_record_is_reported_with_file_and_line_and_the_others_are_seen(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([GOOD_LINE, b"", line, GOOD_LINE]))
    found, bad = read(tmp_path / "a.jsonl")
    assert [document.origin[-6:] for document in found] == ["line 1", "line 4"]
    assert [str(record).partition("a.jsonl ")[2][:6] for record in bad] == ["line 3"]
    assert BAD_LINES[line] in bad[0].reason
    assert "\n" not in str(bad[0])


@pytest.mark.parametrize("line", BAD_LINES, ids=list(BAD_LINES.values()))
def test_strict_stops_at_the_first_bad_record(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([GOOD_LINE, line, GOOD_LINE]))
    with pytest.raises(UserError, match=r"a\.jsonl line 2: "):
        texts(tmp_path / "a.jsonl", strict=True)


def test_bad_records_are_logged_where_nobody_asks_for_them(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + GOOD_LINE)
    with caplog.at_level(logging.WARNING):
        assert texts(tmp_path / "a.jsonl") == ["good"]
    assert "a.jsonl line 1: no field 'text'" in caplog.text


def test_json_lines_may_have_a_mark_crlf_blank_lines_and_no_final_newline(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "a\\r\\n"}',
        b"  ",
        b'{"text": ""}',
        '{"text": "\u2028"}'.encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    assert texts(tmp_path / "a.jsonl", strict=True) == ["a\r\n", "\u2028"]


def test_the_text_field_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert texts(tmp_path / "a.jsonl", text_field="body") == ["yes"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(), st.sampled_from([{"x": "y"}, None, 1]))), st.booleans())
def test_records_in_equal_documents_out_plus_empty_plus_reported(tmp_path, records, ascii_only):
    lines = [
        json.dumps({"text": record} if isinstance(record, str) else record, ensure_ascii=ascii_only)
        for record in records
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found, bad = read(tmp_path / "a.jsonl")
    strings = [record for record in records if isinstance(record, str)]
    assert [document.text for document in found] == [text for text in strings if text]
    assert len(bad) == len(records) - len(strings)


def test_gzip_of_several_members_is_read_whole(tmp_path):
    lines = [json.dumps({"text": str(i)}).encode() + b"\n" for i in range(2)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    (tmp_path / "b.TXT.GZ").write_bytes(gzip.compress(b"a\r\n") + gzip.compress(b"b"))
    assert texts(tmp_path / "*") == ["0", "1", "a\r\nb"]


@pytest.mark.parametrize("cut", [1, 9, 2000])
def test_every_whole_record_of_a_truncated_gzip_is_seen_and_the_cut_reported(tmp_path, cut):
    expected = [random.Random(i).randbytes(50).hex() for i in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in expected)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-cut])
    found, bad = read(tmp_path / "a.jsonl.gz")
    assert len(found) >= 200 - cut // 50
    assert [document.text for document in found] == expected[: len(found)]
    assert [record.origin.split()[-1] for record in bad] == [str(len(found) + 1)]
    with pytest.raises(UserError, match="compressed data are damaged"):
        texts(tmp_path / "a.jsonl.gz", strict=True)


@pytest.mark.parametrize("data", [gzip.compress(b"text" * 100)[:-9], b"not gzip", b"\x1f\x8b\x08"])
def test_damaged_gzip_of_plain_text_is_refused_by_name(tmp_path, data):
    (tmp_path / "a.txt.gz").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.txt\.gz: compressed data are damaged"):
        texts(tmp_path / "a.txt.gz")


def test_python_docs_are_real_text_of_this_python_without_tests_and_tables():
    found = list(documents(PYTHON_DOCS))
    size = sum(len(document.text.encode()) for document in found)
    assert 5_000_000 < size < 14_000_000
    assert len({document.origin for document in found}) == len(found)
    assert found == list(documents(PYTHON_DOCS))
    origins = [document.origin for document in found]
    assert "python-docs argparse.py" in origins
    assert "python-docs topic 'if'" in origins
    assert not [name for name in origins if "/test/" in name or "encodings/" in name]


def test_python_docs_are_read_in_order_of_path_from_any_layout(tmp_path, monkeypatch):
    kept = ["_a.py", "b.py", "b/c.py", "b/d.py"]
    left = ["test/x.py", "b/tests/x.py", "site-packages/p/x.py", "config-3/x.py", "x.txt"]
    left += ["_sysconfigdata_x.py"]
    for name in [*reversed(kept), *left]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert texts(PYTHON_DOCS) == kept


def test_a_python_without_sources_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="python-docs': no Python sources"):
        texts(PYTHON_DOCS)
