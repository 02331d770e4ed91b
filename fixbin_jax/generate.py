"""Text from a checkpoint: one pass over the prompts, then cached decoding.

python -m fixbin_jax.generate --checkpoint=runs/a --prompt="..." --max_new_tokens=64
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fixbin_jax import checkpoint, cli
from fixbin_jax.attention import masked_attention
from fixbin_jax.config import Config
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.errors import UserError
from fixbin_jax.model import Attend, Params, Structure
from fixbin_jax.sharding import single_device

# Ids made by one call into the compiled loop: text appears this often.
_IDS_AT_ONCE = 8
# Prompts are padded to lengths of this times a power of two, so that few shapes are compiled.
_SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next id is chosen.

    Attributes:
      temperature: divides the logits; 0 takes the most likely id.
      top_k: only the k most likely ids; 0 for all.
      top_p: only the most likely ids whose probabilities before them sum to less than p, and
        always the first; 1 for all. Applied to what top_k left.
      seed: the same seed gives the same ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"--temperature: {self.temperature}, expected 0 or more")
        if self.top_k < 0:
            raise UserError(f"--top_k: {self.top_k}, expected 0 (all) or more")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"--top_p: {self.top_p}, expected 0 to 1")


def sample(logits_BxV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """One id for each row, int32 [B], from float32 logits and one random key a row."""
    if sampling.temperature == 0:
        return logits_BxV.argmax(axis=-1).astype(jnp.int32)
    logits_BxV = logits_BxV / sampling.temperature
    vocab_size = logits_BxV.shape[1]
    kept = min(sampling.top_k, vocab_size) or vocab_size
    if kept == vocab_size and sampling.top_p == 1:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BxV).astype(jnp.int32)
    # Sampled among the sorted ids, where both rules are a matter of rank.
    logits_BxK, ids_BxK = jax.lax.top_k(logits_BxV, kept)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(logits_BxK, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        keep = (before < sampling.top_p).at[:, 0].set(True)
        logits_BxK = jnp.where(keep, logits_BxK, -jnp.inf)
    rank_B = jax.vmap(jax.random.categorical)(keys_B, logits_BxK)
    return jnp.take_along_axis(ids_BxK, rank_B[:, None], axis=1)[:, 0].astype(jnp.int32)


class _Decoding(NamedTuple):
    """Between two ids: caches [layer, B, S, H, d] of which columns before `column` are filled."""

    keys: jax.Array
    values: jax.Array
    column: jax.Array
    ids_B: jax.Array  # the newest id, not yet in the caches
    ended_B: jax.Array


class Generator:
    """Continues prompts with a decoder.

    Args:
      structure: of the decoder.
      params: its parameters.
      vocab_size: ids from here on are never chosen (a tokenizer may have fewer than the model).
      end_id: a row that makes this id has ended.
    """

    def __init__(
        self, structure: Structure, params: Params, vocab_size: int, end_id: int
    ) -> None:
        self._structure, self._params = structure, params
        self._vocab_size, self._end_id = vocab_size, end_id
        self._prefill = jax.jit(self._start, static_argnames=("columns", "sampling"))
        self._decode = jax.jit(self._continue, static_argnames="sampling", donate_argnames="state")

    def __call__(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[np.ndarray]]:
        """Yields, again and again until every row has ended, each row's next ids.

        A row's last id is end_id where it ended by itself; after that its parts are empty.

        Args:
          prompts: int ids, at least one each, of different lengths.
          max_new_tokens: most ids a row gets.
          sampling: how ids are chosen.

        Raises:
          UserError: an empty prompt, an id the model does not have, or a prompt that leaves no
            room for max_new_tokens in the context.
        """
        self._check(prompts, max_new_tokens)
        count = len(prompts)
        # Rows beyond the prompts fill up what the mesh divides the batch into.
        rows = -(-count // self._parts) * self._parts
        columns = _padded_length(max(len(prompt) for prompt in prompts))
        ids_BxL = np.zeros((rows, columns), np.int32)
        for row, prompt in enumerate(prompts):
            ids_BxL[row, columns - len(prompt) :] = prompt
        pads_B = np.array([columns - len(p) for p in prompts] + [columns - 1] * (rows - count))
        calls = -(-max_new_tokens // _IDS_AT_ONCE)
        state = self._prefill(
            self._params,
            ids_BxL,
            pads_B,
            np.arange(rows) >= count,
            columns=columns + calls * _IDS_AT_ONCE,
            sampling=sampling,
        )
        made = 0
        ended = np.zeros(count, bool)
        while made < max_new_tokens and not ended.all():
            state, new_BxC = self._decode(self._params, pads_B, state=state, sampling=sampling)
            new = np.asarray(new_BxC)[:count, : max_new_tokens - made]
            made += new.shape[1]
            parts = []
            for row in range(count):
                part = new[row, :0] if ended[row] else new[row]
                (stops,) = np.nonzero(part == self._end_id)
                if len(stops):
                    part, ended[row] = part[: stops[0] + 1], True
                parts.append(part)
            yield parts

    @property
    def _parts(self) -> int:
        return self._structure.place.parts("batch")

    def _check(self, prompts: Sequence[np.ndarray], max_new_tokens: int) -> None:
        config = self._structure.config
        if max_new_tokens < 1:
            raise UserError(f"--max_new_tokens: {max_new_tokens}, expected 1 or more")
        for prompt in prompts:
            if len(prompt) == 0:
                raise UserError("--prompt: no ids, expected at least one")
            if prompt.min() < 0 or prompt.max() >= config.vocab_size:
                raise UserError(
                    f"--prompt: ids {prompt.min()} to {prompt.max()}, the model has 0 to "
                    f"{config.vocab_size - 1}"
                )
            if len(prompt) + max_new_tokens > config.context_length:
                raise UserError(
                    f"--max_new_tokens: {max_new_tokens} after a prompt of {len(prompt)} ids is "
                    f"more than the model's context of {config.context_length}"
                )

    def _start(
        self,
        params: Params,
        ids_BxL: jax.Array,
        pads_B: jax.Array,
        ended_B: jax.Array,
        columns: int,
        sampling: Sampling,
    ) -> _Decoding:
        """Fills the caches from left-padded prompts and chooses each row's first id."""
        decoder = self._structure.decoder(params)
        length = ids_BxL.shape[1]
        column_L = jnp.arange(length)
        seen = column_L[None, :] <= column_L[:, None]
        mask_BxLxS = seen[None] & (column_L >= pads_B[:, None])[:, None, :]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            return masked_attention(q, k, v, mask_BxLxS), (k, v)

        positions = jnp.maximum(column_L - pads_B[:, None], 0)
        x_NxD, caches = decoder.apply_layers(ids_BxL, positions, lambda _: attend, None)
        room = [(0, 0), (0, 0), (0, columns - length), (0, 0), (0, 0)]
        keys, values = (jnp.pad(cache, room) for cache in caches)
        last_BxD = x_NxD.reshape(*ids_BxL.shape, -1)[:, -1]
        ids_B = self._choose(decoder.logits(last_BxD), length, sampling)
        return _Decoding(keys, values, jnp.int32(length), ids_B, ended_B)

    def _choose(self, logits_BxV: jax.Array, column: Any, sampling: Sampling) -> jax.Array:
        # By column and row: what a row gets does not depend on how ids are grouped into calls.
        key = jax.random.fold_in(jax.random.key(sampling.seed), column)
        keys_B = jax.vmap(functools.partial(jax.random.fold_in, key))(
            jnp.arange(logits_BxV.shape[0])
        )
        return sample(logits_BxV[:, : self._vocab_size], keys_B, sampling)

    def _continue(
        self, params: Params, pads_B: jax.Array, state: _Decoding, sampling: Sampling
    ) -> tuple[_Decoding, jax.Array]:
        """The next _IDS_AT_ONCE ids of each row, [B, _IDS_AT_ONCE], end_id once it has ended."""
        decoder = self._structure.decoder(params)
        column_S = jnp.arange(state.keys.shape[2])

        def one(state: _Decoding, _: None) -> tuple[_Decoding, jax.Array]:
            mask_BxS = (column_S <= state.column) & (column_S >= pads_B[:, None])

            def attend_of_layer(caches: tuple[jax.Array, jax.Array]) -> Attend:
                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                    keys, values = (
                        jax.lax.dynamic_update_slice_in_dim(cache, new, state.column, axis=1)
                        for cache, new in zip(caches, (k, v), strict=True)
                    )
                    return masked_attention(q, keys, values, mask_BxS[:, None]), (keys, values)

                return attend

            made_B = jnp.where(state.ended_B, self._end_id, state.ids_B)
            ended_B = made_B == self._end_id
            positions = (state.column - pads_B)[:, None]
            x_BxD, (keys, values) = decoder.apply_layers(
                made_B[:, None], positions, attend_of_layer, (state.keys, state.values)
            )
            next_B = self._choose(decoder.logits(x_BxD), state.column + 1, sampling)
            return _Decoding(keys, values, state.column + 1, next_B, ended_B), made_B

        state, made_CxB = jax.lax.scan(one, state, None, length=_IDS_AT_ONCE)
        return state, made_CxB.T


def _padded_length(length: int) -> int:
    padded = _SHORTEST
    while padded < length:
        padded *= 2
    return padded


class TextStream:
    """Ids that arrive in parts, as text that can already be shown."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._shown = len(tokenizer.decode(self._ids))

    def add(self, ids: np.ndarray, last: bool = False) -> str:
        """The text these ids add; bytes that may begin a character wait for the next ids."""
        end = self._tokenizer.end_of_text_id
        self._ids += [int(i) for i in ids if i != end]
        text = self._tokenizer.decode(self._ids)
        if not last:
            text = text.rstrip("\ufffd")
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """The prompt's ids; for an empty one the end-of-text id, after which a document starts."""
    return tokenizer.encode(prompt) if prompt else np.array([tokenizer.end_of_text_id])


def load_generator(path: str | Path) -> tuple[Generator, Tokenizer, Config]:
    """The newest step of a run folder, or a step folder, ready to generate on one device."""

    def read(folder: Path) -> tuple[Generator, Tokenizer, Config]:
        config = checkpoint.read_record(folder).config
        tokenizer = checkpoint.read_tokenizer(folder)
        structure = Structure(config.model, config.compute, single_device())
        params = checkpoint.read_params(folder, structure.shapes)
        generator = Generator(structure, params, tokenizer.vocab_size, tokenizer.end_of_text_id)
        return generator, tokenizer, config

    found = checkpoint.open_newest(path, read)
    if found is None:
        raise UserError(f"--checkpoint: {path} holds no complete step")
    return found[1]


def _define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "checkpoint", None, "Run folder, or one step folder.", required=True, flag_values=fv
    )
    flags.DEFINE_multi_string(
        "prompt", [""], "What to continue; repeat it for a batch.", flag_values=fv
    )
    flags.DEFINE_integer("max_new_tokens", 64, "Most ids to make.", flag_values=fv)
    flags.DEFINE_float("temperature", 1.0, "0 is greedy.", flag_values=fv)
    flags.DEFINE_integer("top_k", 0, "Only the k most likely ids; 0: all.", flag_values=fv)
    flags.DEFINE_float("top_p", 1.0, "Only the likeliest ids of this share.", flag_values=fv)
    flags.DEFINE_integer("seed", 0, "The same seed gives the same text.", flag_values=fv)


def main(fv: flags.FlagValues) -> None:
    """Prints each prompt with its continuation; a single one as it is made."""
    sampling = Sampling(fv.temperature, fv.top_k, fv.top_p, fv.seed)
    generator, tokenizer, _ = load_generator(fv.checkpoint)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in fv.prompt]
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    texts = list(fv.prompt)
    live = len(prompts) == 1
    if live:
        print(texts[0], end="", flush=True)
    for parts in generator(prompts, fv.max_new_tokens, sampling):
        for row, part in enumerate(parts):
            new = streams[row].add(part)
            texts[row] += new
            if live:
                print(new, end="", flush=True)
    rests = [stream.add(np.array([], int), last=True) for stream in streams]
    if live:
        print(rests[0])
    else:
        for text, rest in zip(texts, rests, strict=True):
            print(text + rest, end="\n\n")


if __name__ == "__main__":
    cli.run(main, _define_flags, sys.argv)
