"""Run folders of small models, as a training run leaves them."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fixbin_jax.checkpoint import Checkpoints
from fixbin_jax.config import Config
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.data.train_tokenizer import train_sentencepiece
from fixbin_jax.model import Structure
from fixbin_jax.step import State
from tests import tiny


@functools.cache
def run_tokenizer() -> Tokenizer:
    """A SentencePiece model of 300 ids over words of eight letters."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
    return train_sentencepiece([" ".join(words)], 300)


def make_run(folder: Path, tokenizer: Tokenizer | None, **model: Any) -> Path:
    """Step 3 of a run whose weights are big enough that errors show."""
    config = tiny.change(Config(model=tiny.MODEL), model=model)
    structure = Structure(config.model, config.compute, tiny.placement())
    params = tiny.randomised(structure.init(0))
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(State(jnp.int32(3), params, None), {}, config, tokenizer)
    return folder
