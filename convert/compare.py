"""Logits of a PyTorch model and of ours, side by side.

python -m convert.compare --hf=DIR --checkpoint=runs/b [--text=FILE] [--json]
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from absl import flags

from convert.identify import read_settings
from convert.oracle import torch_oracle
from convert.settle import Oracle
from convert.weights import WeightFiles
from fixbin_jax import checkpoint, cli
from fixbin_jax.config import ComputeConfig, ModelConfig
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.errors import UserError
from fixbin_jax.model import Structure
from fixbin_jax.sharding import single_device


@dataclass(frozen=True)
class Comparison:
    """How far two models' logits are apart. Keys of --json, in this order.

    Attributes:
      max_abs_diff: the largest difference of a logit.
      mean_abs_diff: the mean difference over all logits.
      top1_agreement: share of positions at which both have the same likeliest id.
      perplexity_hf: exp of the mean loss per next id, of the PyTorch model.
      perplexity: the same of ours.
      sequences: number of sequences compared.
      tokens: number of positions compared, in all sequences.
      max_abs_diff_per_position: the largest difference at each position.
    """

    max_abs_diff: float
    mean_abs_diff: float
    top1_agreement: float
    perplexity_hf: float
    perplexity: float
    sequences: int
    tokens: int
    max_abs_diff_per_position: tuple[float, ...]


def compare(theirs: Oracle, ours: Oracle, ids_NxL: np.ndarray) -> Comparison:
    """Compares two models on sequences of ids, one sequence at a time.

    Args:
      theirs: int32 ids [1, L] to float32 logits [1, L, V], of PyTorch.
      ours: the same.
      ids_NxL: int32, L at least 2.
    """
    count, length = ids_NxL.shape
    largest_L = np.zeros(length)
    total, agreeing, size = 0.0, 0, 0
    losses = [0.0, 0.0]
    for row in ids_NxL:
        pair = [model(row[None])[0] for model in (theirs, ours)]
        if pair[0].shape != pair[1].shape:
            raise UserError(
                f"--hf, --checkpoint: logits of shapes {list(pair[0].shape)} and "
                f"{list(pair[1].shape)}; the vocabularies differ"
            )
        difference = np.abs(pair[0] - pair[1])
        largest_L = np.maximum(largest_L, difference.max(axis=1))
        total += float(difference.sum(dtype=np.float64))
        size += difference.size
        agreeing += int((pair[0].argmax(axis=1) == pair[1].argmax(axis=1)).sum())
        for i, logits in enumerate(pair):
            losses[i] += _loss(logits, row)
    mean = [float(np.exp(loss / (count * (length - 1)))) for loss in losses]
    return Comparison(
        max_abs_diff=float(largest_L.max()),
        mean_abs_diff=total / size,
        top1_agreement=agreeing / (count * length),
        perplexity_hf=mean[0],
        perplexity=mean[1],
        sequences=count,
        tokens=count * length,
        max_abs_diff_per_position=tuple(largest_L.tolist()),
    )


def _loss(logits_LxV: np.ndarray, ids_L: np.ndarray) -> float:
    """Sum of -log p of each next id, in float64."""
    logits = logits_LxV[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, ids_L[1:, None], axis=1)[:, 0]
    return float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum())


def _ours(path: str) -> tuple[ModelConfig, Callable[[], Tokenizer], Oracle]:
    """A checkpoint's model in float32, its tokenizer where it is asked for, and its logits."""

    def read(folder: Path) -> tuple[ModelConfig, Callable[[], Tokenizer], Oracle]:
        model = checkpoint.read_record(folder).config.model
        structure = Structure(model, ComputeConfig(), single_device())
        params = checkpoint.read_params(folder, structure.shapes)
        forward = jax.jit(lambda params, ids: structure.decoder(params)(ids))

        def logits(ids_BxL: np.ndarray) -> np.ndarray:
            return np.asarray(forward(params, ids_BxL), np.float32)

        return model, lambda: checkpoint.read_tokenizer(folder), logits

    found = checkpoint.open_newest(path, read)
    if found is None:
        raise UserError(f"--checkpoint: {path} holds no complete step")
    return found[1]


def _text_ids(path: Path, tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """The first windows of a text, int32 [N, L]."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"--text: {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"--text: {path}: not UTF-8: {error}") from error
    ids = tokenizer.encode(text)
    length = min(length, len(ids))
    if length < 2:
        raise UserError(f"--text: {path}: {len(ids)} ids, expected 2 or more")
    windows = min(count, len(ids) // length)
    return ids[: windows * length].reshape(windows, length).astype(np.int32)


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    flags.DEFINE_string("hf", None, "Hugging Face folder.", required=True, flag_values=fv)
    flags.DEFINE_string(
        "checkpoint", None, "Run folder, or one step folder.", required=True, flag_values=fv
    )
    flags.DEFINE_string("text", None, "UTF-8 text; random ids without it.", flag_values=fv)
    flags.DEFINE_integer("sequences", 8, "Most sequences to compare.", 1, flag_values=fv)
    flags.DEFINE_integer(
        "length", 0, "Ids in a sequence; 0: the model's context.", 0, flag_values=fv
    )
    flags.DEFINE_integer("seed", 0, "Of the random ids.", 0, flag_values=fv)
    flags.DEFINE_boolean(
        "trust_remote_code",
        False,
        "Run the Python code that the --hf folder brings, as a fixbin export does.",
        flag_values=fv,
    )
    flags.DEFINE_boolean("json", False, "Print one JSON object.", flag_values=fv)


def main(fv: flags.FlagValues) -> None:
    """Runs the command."""
    folder = Path(fv.hf).expanduser()
    if not folder.is_dir():
        raise UserError(f"--hf: {folder}: no such folder")
    model, tokenizer, ours = _ours(fv.checkpoint)
    length = fv.length or model.context_length
    if not 2 <= length <= model.context_length:
        raise UserError(f"--length: {length}, expected 2 to the context, {model.context_length}")
    if fv.text is None:
        shape = (fv.sequences, length)
        ids = np.random.default_rng(fv.seed).integers(0, model.vocab_size, shape, np.int32)
    else:
        ids = _text_ids(Path(fv.text).expanduser(), tokenizer(), fv.sequences, length)
    if "auto_map" in read_settings(folder) and not fv.trust_remote_code:
        raise UserError(f"--hf: {folder} brings its own code; --trust_remote_code lets it run")
    files = WeightFiles.open(folder)
    theirs = torch_oracle(folder, files, trust_remote_code=fv.trust_remote_code)
    found = compare(theirs, ours, ids)
    if fv.json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    per_position = found.max_abs_diff_per_position
    worst = int(np.argmax(per_position))
    print(f"compared    {found.sequences} sequences of {len(per_position)} ids")
    print(f"difference  largest {found.max_abs_diff:.3g} (position {worst}), ", end="")
    print(f"mean {found.mean_abs_diff:.3g}")
    print(f"likeliest   the same id at {100 * found.top1_agreement:.2f}% of positions")
    print(f"perplexity  {found.perplexity_hf:.6g} PyTorch, {found.perplexity:.6g} JAX")


if __name__ == "__main__":
    cli.run(main, define_flags)
