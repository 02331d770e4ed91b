"""Documents, streamed from files or from the text that every CPython ships.

A source is a path or a glob that fsspec understands, or "python-docs"; several are separated by
commas and read in their order.

What is a record: a plain-text file is one document; in a `.jsonl` file every line that is not
blank is one record and the document is its text field. Text is kept as it stands, line ends
included; only a byte-order mark at the head of a file is dropped, being a mark of the encoding and
not text. Empty documents are left out.

What happens to faults: a source or file that cannot be read as what its name says (missing, a
directory, unreadable, plain text that is not UTF-8 or is cut short) is a `UserError`. A bad record
in a file of many is handed to `on_bad_record` and skipped, so that every valid record is seen;
with `strict` it is a `UserError` too.
"""

import codecs
import glob
import gzip
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import fsspec

from fixbin_jax.errors import UserError

PYTHON_DOCS = "python-docs"

# Directories of the standard library that hold tests, tables made by programs, or no library text.
_NOT_TEXT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}
# Files and directories that describe the build of this one interpreter.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")

_JSON_NAMES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}

_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True, slots=True)
class Document:
    """One text, with where it came from (file, file and line, or topic) for messages."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that gave no document, and why."""

    origin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source on an fsspec file system."""

    filesystem: fsspec.AbstractFileSystem
    path: str


BadRecordHandler = Callable[[BadRecord], None]


def log_bad_record(record: BadRecord) -> None:
    """Logs a bad record as a warning."""
    logging.getLogger(__name__).warning("skipped %s", record)


def documents(
    source: str,
    text_field: str = "text",
    *,
    strict: bool = False,
    on_bad_record: BadRecordHandler = log_bad_record,
) -> Iterator[Document]:
    """Yields the documents of a source, the files of a glob in the order of their paths.

    Args:
      source: what to read, see the module.
      text_field: the field of a JSON record that holds the text.
      strict: whether a bad record stops with a `UserError`.
      on_bad_record: called with each bad record when not strict.

    Raises:
      UserError: see the module's account of faults.
    """

    def refuse(record: BadRecord) -> None:
        raise UserError(str(record))

    report = refuse if strict else on_bad_record
    for part in source.split(","):
        name = part.strip()
        if name == PYTHON_DOCS:
            found = _python_docs()
        else:
            found = (
                document
                for file in list_files(name)
                for document in read_file(file, text_field, report)
            )
        yield from (document for document in found if document.text)


def list_files(source: str) -> list[SourceFile]:
    """The files a path or glob names, sorted by path.

    Raises:
      UserError: if there is none, if it is a directory, or if the file system is not known.
    """
    if not source:
        raise UserError("source '': expected a path, a glob or python-docs")
    try:
        filesystem, path = fsspec.core.url_to_fs(source)
    except (ValueError, ImportError) as error:
        raise UserError(f"source {source!r}: {error}") from error
    try:
        info = filesystem.info(path)
    except FileNotFoundError:
        info = None
    except (OSError, ValueError) as error:
        raise UserError(f"source {source!r}: cannot be read: {error}") from error
    if info is not None and info["type"] == "directory":
        raise UserError(
            f"source {source!r}: is a directory, expected a file or a glob such as "
            f"{source.rstrip('/')}/*.txt"
        )
    if info is not None:
        paths = [path]
    elif glob.has_magic(path):
        matches = filesystem.glob(path, detail=True)
        paths = sorted(name for name, match in matches.items() if match["type"] != "directory")
        if not paths:
            raise UserError(f"source {source!r}: the pattern matches no file")
    else:
        raise UserError(f"source {source!r}: no such file")
    return [SourceFile(filesystem, path) for path in paths]


def read_file(file: SourceFile, text_field: str, report: BadRecordHandler) -> Iterator[Document]:
    """Yields the documents of one file, read by the suffix of its name; `.gz` is unpacked.

    Raises:
      UserError: if the file as a whole cannot be read.
    """
    name = PurePosixPath(file.path.lower())
    compressed = name.suffix == ".gz"
    suffix = name.with_suffix("").suffix if compressed else name.suffix
    try:
        with file.filesystem.open(file.path, "rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            if suffix == ".jsonl":
                yield from _json_lines(stream, file.path, text_field, report)
            else:
                yield Document(_utf8(stream.read(), file.path), file.path)
    except _DAMAGED as error:
        raise UserError(f"{file.path}: compressed data are damaged: {error}") from error
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from error


def _utf8(data: bytes, path: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is 0x{data[error.start]:02x} ({error.reason}), "
            "expected UTF-8 text"
        ) from error
    return text.removeprefix("\ufeff")


def _json_lines(
    lines: Iterable[bytes], path: str, text_field: str, report: BadRecordHandler
) -> Iterator[Document]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            origin = f"{path} line {number}"
            try:
                text = _record_text(line, text_field)
            except ValueError as error:
                report(BadRecord(origin, str(error)))
                continue
            yield Document(text, origin)
    except _DAMAGED as error:
        origin = f"{path} line {number + 1}"
        reason = f"compressed data are damaged, nothing from here on was read: {error}"
        report(BadRecord(origin, reason))


def _record_text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of the line is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"found a JSON {_JSON_NAMES[type(record)]}, expected an object")
    if text_field not in record:
        raise ValueError(f"no field {text_field!r}, found {sorted(record)[:8]}")
    text = record[text_field]
    if not isinstance(text, str):
        found = _JSON_NAMES[type(text)]
        raise ValueError(f"field {text_field!r} is {found}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"field {text_field!r} has a lone surrogate at character {error.start}"
        ) from error
    return text


def _python_docs() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _NOT_TEXT and not name.startswith(_BUILD_PREFIXES)
        ]
        paths += [
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith(_BUILD_PREFIXES)
        ]
    if not paths:
        raise UserError(f"source {PYTHON_DOCS!r}: no Python sources under {root}")
    for path in sorted(paths):
        if path == "pydoc_data/topics.py":
            from pydoc_data.topics import topics

            for topic in sorted(topics):
                yield Document(topics[topic], f"{PYTHON_DOCS} topic {topic!r}")
        else:
            origin = f"{PYTHON_DOCS} {path}"
            yield Document(_utf8((root / path).read_bytes(), origin), origin)
