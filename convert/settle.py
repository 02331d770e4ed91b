"""Settles a proposal's open conventions: the one combination whose logits are the oracle's.

A combination is a layout, so what is compared is what would be imported. Position 0 sees itself
alone and no rotation, so sequences of one id, which are cheap, rule most combinations out before
whole sequences are compared.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from convert.assemble import read_config, read_input, read_model
from convert.discover import Proposal
from convert.layouts import Layout
from convert.weights import WeightFiles
from fixbin_jax.codes import code_table
from fixbin_jax.config import ComputeConfig, InputConfig, ModelConfig
from fixbin_jax.errors import UserError
from fixbin_jax.model import Params, Structure
from fixbin_jax.sharding import single_device

# ids [B, L] -> logits [B, L, V], float32, of the checkpoint's own model.
Oracle = Callable[[np.ndarray], np.ndarray]

# Float32 rounding, as a share of the largest logit; the least wrong convention is far above it.
_TOLERANCE = 1e-4
# Combinations this much further off than the best one are told apart from it.
_MARGIN = 10.0
_SEQUENCES, _LENGTH = 4, 32


@dataclass(frozen=True)
class Settled:
    """What was decided.

    Attributes:
      layout: the checkpoint's.
      choices: open convention -> what it is.
      difference: largest difference of a logit from the oracle's.
      tried: number of combinations.
      next_difference: that of the nearest other combination; None where there was no other.
    """

    layout: Layout
    choices: Mapping[str, str]
    difference: float
    tried: int
    next_difference: float | None


@dataclass
class _Candidate:
    choices: dict[str, str]
    layout: Layout
    input: InputConfig
    difference: float = 0.0


def probe_ids(model: ModelConfig, special: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    """int32 [B, L] random ids of a model, the special ones among them, to compare logits on."""
    length = min(_LENGTH, model.context_length)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, model.vocab_size, (_SEQUENCES, length), np.int32)
    # In the first column, so that sequences of one id have them too.
    ids[: len(special), 0] = special
    return ids


def settle(
    proposal: Proposal, files: WeightFiles, config: Mapping[str, Any], oracle: Oracle
) -> Settled:
    """The one combination of open conventions that gives the oracle's logits.

    Raises:
      UserError: none does, or several that are different models do.
    """
    sizes = read_config(files, proposal.layout, config)
    candidates = _distinct(proposal, files, config, sizes)
    tried = len(candidates)
    special = (config.get("pad_token_id"), config.get("eos_token_id"))
    ids = probe_ids(sizes, tuple(i for i in special if isinstance(i, int)))
    next_difference: float | None = None
    for part in (ids[:, :1], ids):
        expected = oracle(part)
        _compare(candidates, files, config, part, expected)
        candidates.sort(key=lambda candidate: candidate.difference)
        best: float = candidates[0].difference
        scale: float = max(1.0, float(np.abs(expected).max()))
        if not best <= _TOLERANCE * scale:
            raise UserError(
                f"--layout=auto: none of {tried} combinations gives the model's own logits: the "
                f"nearest ({_told(candidates[0].choices)}) is {best:.2g} off at the worst position"
            )
        floor = _MARGIN * max(best, float(np.finfo(np.float32).eps) * scale)
        fitting = [c for c in candidates if c.difference <= floor]
        if len(fitting) < len(candidates):
            nearest = candidates[len(fitting)].difference
            next_difference = nearest if next_difference is None else min(nearest, next_difference)
        candidates = fitting
    if len(candidates) > 1:
        told = " and ".join(f"({_told(c.choices)})" for c in candidates[:2])
        raise UserError(
            f"--layout=auto: {len(candidates)} combinations give the model's own logits, {told} "
            "among them; a layout file must choose"
        )
    (found,) = candidates
    return Settled(found.layout, found.choices, found.difference, tried, next_difference)


def _distinct(
    proposal: Proposal, files: WeightFiles, config: Mapping[str, Any], sizes: ModelConfig
) -> list[_Candidate]:
    """The combinations that are different models, the first of each."""
    inputs: dict[Any, InputConfig] = {}
    found: dict[Any, _Candidate] = {}
    for choices, layout in proposal.candidates():
        if layout.input not in inputs:
            inputs[layout.input] = read_input(files, layout, config, sizes.vocab_size, sizes.width)
        source = inputs[layout.input]
        fusion = next((row.fusion for row in layout.tensors if row.fusion), None)
        key = (
            fusion if sizes.num_heads > 1 else None,
            layout.rope if sizes.head_width > 2 else None,
            layout.gelu,
            source.code(sizes.vocab_size),
        )
        found.setdefault(key, _Candidate(choices, layout, source))
    return list(found.values())


def _compare(
    candidates: list[_Candidate],
    files: WeightFiles,
    config: Mapping[str, Any],
    ids: np.ndarray,
    expected: np.ndarray,
) -> None:
    """Notes each candidate's largest difference, reading the weights once an arrangement."""
    key = lambda c: (str(c.layout.tensors), c.layout.rope)  # noqa: E731
    for _, group in itertools.groupby(sorted(candidates, key=key), key):
        arranged = list(group)
        model, params = read_model(files, arranged[0].layout, config)
        for candidate in arranged:
            logits = _logits(candidate, model, params, ids)
            candidate.difference = float(np.abs(logits - expected).max())


def _logits(
    candidate: _Candidate, model: ModelConfig, params: Params, ids: np.ndarray
) -> np.ndarray:
    """float32 [B, L, V] of the model with a candidate's input and GELU.

    The vectors of the few ids at hand stand in for the input interface as a table, so that one
    program serves every code.
    """
    code = candidate.input.code(model.vocab_size)
    if code is not None:
        distinct, index = np.unique(ids, return_inverse=True)
        table = code_table(code, distinct, model.width).astype(np.float32)
        params, ids = params | {"input": {"table": table}}, index.reshape(ids.shape)
    learned = InputConfig(interface="learned")
    model = dataclasses.replace(model, input=learned, gelu=candidate.layout.gelu)
    return np.asarray(_forward(model)(params, ids))


@functools.cache
def _forward(model: ModelConfig) -> Callable[[Params, np.ndarray], jax.Array]:
    structure = Structure(model, ComputeConfig(), single_device())
    return jax.jit(lambda params, ids: structure.decoder(params)(ids))


def _told(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{convention} {option}" for convention, option in choices.items())
