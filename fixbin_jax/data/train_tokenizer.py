"""Trains a SentencePiece tokenizer on a source of text.

python -m fixbin_jax.data.train_tokenizer --input='data/*.txt' --vocab_size=8000 --output=tokenizer
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece
from absl import flags

from fixbin_jax import cli
from fixbin_jax.data.sources import documents
from fixbin_jax.data.tokenizers import SentencePieceTokenizer
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
) -> SentencePieceTokenizer:
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
        print(f"read {count:,} documents, {text_bytes:,} bytes; training", flush=True)

    tokenizer = train_sentencepiece(texts(), vocab_size)
    tokenizer.save(output)
    print(f"{output}: {tokenizer.vocab_size} ids, end of text {tokenizer.end_of_text_id}")
    return tokenizer


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Trains a SentencePiece BPE model that gives every text back as it was.

    Nothing is normalised, no space is added or taken, and characters outside the vocabulary are
    spelt in bytes. The ids: 0 padding, 1 end of text, 2 unknown (never produced), 3 to 258 bytes.

    Args:
      texts: training texts; all are held in memory by the trainer.
      vocab_size: the number of ids.

    Raises:
      UserError: if the trainer cannot make a vocabulary of this size from these texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 30,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # "INTERNAL: file(line) [failed condition] words for the user"
        reason = str(error).rpartition("] ")[2].strip() or str(error)
        # What follows advises flags of its own commands.
        reason = reason.partition(". Increase")[0]
        raise UserError(f"--vocab_size: {vocab_size}, SentencePiece refuses: {reason}") from error
    return SentencePieceTokenizer(model.getvalue(), "the trained model")


if __name__ == "__main__":
    cli.run(main, define_flags)
