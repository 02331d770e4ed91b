"""Trains a SentencePiece tokenizer on a source of text.

python -m fixbin_jax.data.train_tokenizer --input='data/*.txt' --vocab_size=8000 --output=tokenizer
"""

from collections.abc import Iterator
from pathlib import Path

from absl import flags

from fixbin_jax import cli
from fixbin_jax.data.sources import documents
from fixbin_jax.data.tokenizers import Tokenizer, train_sentencepiece
from fixbin_jax.errors import UserError


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    flags.DEFINE_string(
        "input", None, "Paths, globs or python-docs to train on.", required=True, flag_values=fv
    )
    flags.DEFINE_integer("vocab_size", None, "Number of ids.", required=True, flag_values=fv)
    flags.DEFINE_string(
        "output", None, "Folder for tokenizer.model.", required=True, flag_values=fv
    )
    flags.DEFINE_string(
        "text_field", "text", "Field of a JSON record that holds the text.", flag_values=fv
    )


def main(fv: flags.FlagValues) -> None:
    """Runs the command."""
    train_tokenizer(fv.input, fv.vocab_size, Path(fv.output).expanduser(), text_field=fv.text_field)


def train_tokenizer(
    source: str, vocab_size: int, output: Path, *, text_field: str = "text"
) -> Tokenizer:
    """Trains a tokenizer on a source, saves it into a folder and says what it made.

    Raises:
      UserError: see `sources.documents`, `train_sentencepiece` and `Tokenizer.save`.
    """
    count = text_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal count, text_bytes
        for document in documents(source, text_field):
            count += 1
            text_bytes += len(document.text.encode("utf-8"))
            yield document.text
        if not count:
            raise UserError(f"source {source!r}: no document with any text")
        print(f"read {count} documents, {text_bytes} bytes; training", flush=True)

    tokenizer = train_sentencepiece(texts(), vocab_size)
    tokenizer.save(output)
    print(f"{output}: {tokenizer.vocab_size} ids, end of text {tokenizer.end_of_text_id}")
    return tokenizer


if __name__ == "__main__":
    cli.run(main, define_flags)
