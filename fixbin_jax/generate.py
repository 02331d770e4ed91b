"""Text from a checkpoint: one pass over the prompts, then cached decoding.

python -m fixbin_jax.generate --checkpoint=runs/a --prompt="..." --max_new_tokens=64
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fixbin_jax import checkpoint, cli
from fixbin_jax.attention import masked_attention
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.errors import UserError
from fixbin_jax.model import Attend, Params, Structure
from fixbin_jax.sharding import single_device

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
      seed: the same seed gives the same ids; below 2^32.
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
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed: {self.seed}, expected 0 to {2**32 - 1}")


def sample(logits_BxV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """One id for each row, int32 [B], from float32 logits and one random key a row."""
    if sampling.temperature == 0:
        return logits_BxV.argmax(axis=-1).astype(jnp.int32)
    # The largest becomes 0, so that no temperature is too small for float32.
    logits_BxV = (logits_BxV - logits_BxV.max(axis=-1, keepdims=True)) / sampling.temperature
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


class _Caches(NamedTuple):
    """Keys and values of the ids so far, [layer, B, S, H, d] each, S being columns."""

    keys: jax.Array
    values: jax.Array


class Generator:
    """Continues prompts with a decoder.

    Args:
      structure: of the decoder.
      params: its parameters.
      vocab_size: ids from here on are never chosen (a tokenizer may have fewer than the model).
      end_id: a row that makes this id has ended.
    """

    def __init__(self, structure: Structure, params: Params, vocab_size: int, end_id: int) -> None:
        place = structure.place
        # Layers unrolled would split the stacked weights into copies for every id.
        compute = dataclasses.replace(structure.compute, scan_layers=True)
        self._structure = Structure(structure.config, compute, place)
        self._params, self._vocab_size, self._end_id = params, vocab_size, end_id
        # The caches as the next call takes them, the ids on every device.
        shardings = (place.sharding(("layer", "batch", None, "heads", None)), place.replicated)
        self._prefill = jax.jit(
            self._start, static_argnames=("columns", "sampling"), out_shardings=shardings
        )
        self._decode = jax.jit(
            self._continue,
            static_argnames="sampling",
            donate_argnames="caches",
            out_shardings=shardings,
        )

    def __call__(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[np.ndarray]]:
        """Each row's next ids, int32, again and again until every row has ended.

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
        return self._parts(prompts, max_new_tokens, sampling)

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
            if len(prompt) >= config.context_length:
                raise UserError(
                    f"--prompt: {len(prompt)} ids, expected fewer than the model's context of "
                    f"{config.context_length}"
                )
            if len(prompt) + max_new_tokens > config.context_length:
                raise UserError(
                    f"--max_new_tokens: {max_new_tokens} after a prompt of {len(prompt)} ids is "
                    f"more than the model's context of {config.context_length}"
                )

    def _parts(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[np.ndarray]]:
        count = len(prompts)
        # Rows beyond the prompts, of one id, fill up what the mesh divides the batch into.
        rows = count + -count % self._structure.place.parts("batch")
        length = _padded_length(max(len(prompt) for prompt in prompts))
        ids_BxL = np.zeros((rows, length), np.int32)
        pads_B = np.full(rows, length - 1, np.int32)
        for row, prompt in enumerate(prompts):
            pads_B[row] = length - len(prompt)
            ids_BxL[row, pads_B[row] :] = prompt
        seed = np.uint32(sampling.seed)
        sampling = dataclasses.replace(sampling, seed=0)  # Every seed runs the same program.
        caches, next_B = self._prefill(
            self._params,
            ids_BxL,
            pads_B,
            seed,
            columns=length + max_new_tokens,
            sampling=sampling,
        )
        ended = np.zeros(count, bool)
        for column in range(length, length + max_new_tokens):
            ids_B = next_B
            # Begun before the ids are read: the device does not wait for the reader.
            if column + 1 < length + max_new_tokens:
                caches, next_B = self._decode(
                    self._params, ids_B, pads_B, np.int32(column), seed, caches, sampling=sampling
                )
            ids = np.asarray(ids_B)[:count]
            yield [ids[:0] if ended[row] else ids[row : row + 1] for row in range(count)]
            ended |= ids == self._end_id
            if ended.all():
                return

    def _start(
        self,
        params: Params,
        ids_BxL: jax.Array,
        pads_B: jax.Array,
        seed: jax.Array,
        columns: int,
        sampling: Sampling,
    ) -> tuple[_Caches, jax.Array]:
        """Caches with room for all columns, and each row's first id, from left-padded prompts."""
        decoder = self._structure.decoder(params)
        length = ids_BxL.shape[1]
        column_L = jnp.arange(length)
        mask_BxLxS = (column_L <= column_L[:, None]) & (column_L >= pads_B[:, None, None])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, _Caches]:
            return masked_attention(q, k, v, mask_BxLxS), _Caches(k, v)

        positions = jnp.maximum(column_L - pads_B[:, None], 0)
        x_NxD, caches = decoder.apply_layers(ids_BxL, positions, lambda _: attend, None)
        room = [(0, 0), (0, 0), (0, columns - length), (0, 0), (0, 0)]
        caches = jax.tree.map(lambda cache: jnp.pad(cache, room), caches)
        last_BxD = x_NxD.reshape(*ids_BxL.shape, -1)[:, -1]
        return caches, self._choose(decoder.logits(last_BxD), length - pads_B, seed, sampling)

    def _continue(
        self,
        params: Params,
        ids_B: jax.Array,
        pads_B: jax.Array,
        column: jax.Array,
        seed: jax.Array,
        caches: _Caches,
        sampling: Sampling,
    ) -> tuple[_Caches, jax.Array]:
        """Caches that hold the newest ids at `column`, and each row's next id."""
        decoder = self._structure.decoder(params)
        column_S = jnp.arange(caches.keys.shape[2])
        mask_Bx1xS = ((column_S <= column) & (column_S >= pads_B[:, None]))[:, None]

        def put(cache: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, column, axis)

        def attend_of_layer(caches: _Caches) -> Attend:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, _Caches]:
                keys, values = put(caches.keys, k, 1), put(caches.values, v, 1)
                # Only what is new leaves the layer: the caches are written once, in place.
                return masked_attention(q, keys, values, mask_Bx1xS), _Caches(k, v)

            return attend

        positions_B = column - pads_B
        x_BxD, new = decoder.apply_layers(
            ids_B[:, None], positions_B[:, None], attend_of_layer, caches
        )
        caches = _Caches(put(caches.keys, new.keys, 2), put(caches.values, new.values, 2))
        return caches, self._choose(decoder.logits(x_BxD), positions_B + 1, seed, sampling)

    def _choose(
        self, logits_BxV: jax.Array, positions_B: jax.Array, seed: jax.Array, sampling: Sampling
    ) -> jax.Array:
        """The ids at these positions: a row's chance depends neither on others nor on padding."""
        key = jax.random.key(seed)

        def key_of(row: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(key, row), position)

        keys_B = jax.vmap(key_of)(jnp.arange(len(positions_B)), positions_B)
        return sample(logits_BxV[:, : self._vocab_size], keys_B, sampling)


def _padded_length(length: int) -> int:
    padded = _SHORTEST
    while padded < length:
        padded *= 2
    return padded


class TextStream:
    """Ids that arrive in parts, as text that can already be shown.

    What `add` returned, joined, is the text of all ids after that of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray) -> None:
        self._tokenizer, self._ids = tokenizer, prompt.tolist()
        self._shown = len(tokenizer.decode(self._ids))
        # A character's last byte, where characters are spelt in bytes.
        self._stray = tokenizer.encode("\U0010ffff")[-1:].tolist()

    def add(self, ids: np.ndarray, last: bool = False) -> str:
        """The text these ids add; what later ids may still change waits for them."""
        self._ids += ids.tolist()
        text = self._tokenizer.decode(self._ids)
        if not last:
            # Bytes at the end may yet become a character.
            text = text.rstrip("\ufffd")
            # A wrong byte may yet turn all bytes before it, complete characters too, into U+FFFD.
            if not self._tokenizer.decode(self._ids + self._stray).startswith(text):
                return ""
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """The prompt's ids; for an empty one the end-of-text id, after which a document starts."""
    return tokenizer.encode(prompt) if prompt else np.array([tokenizer.end_of_text_id])


def load_generator(path: str | Path) -> tuple[Generator, Tokenizer]:
    """The newest step of a run folder, or a step folder, ready to generate on one device.

    Raises:
      UserError: there is no such folder, or no step in it that can be read.
    """

    def read(folder: Path) -> tuple[Generator, Tokenizer]:
        config = checkpoint.read_record(folder).config
        tokenizer = checkpoint.read_tokenizer(folder)
        structure = Structure(config.model, config.compute, single_device())
        params = checkpoint.read_params(folder, structure.shapes)
        generator = Generator(structure, params, tokenizer.vocab_size, tokenizer.end_of_text_id)
        return generator, tokenizer

    found = checkpoint.open_newest(path, read)
    if found is None:
        raise UserError(f"--checkpoint: {path} holds no complete step")
    return found[1]


def define_flags(fv: flags.FlagValues) -> None:
    """Defines the flags of the command."""
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


def _as_unicode(prompt: str) -> str:
    """The prompt; bytes of it that the locale could not decode are read as UTF-8."""
    if not any("\ud800" <= character <= "\udfff" for character in prompt):
        return prompt
    try:
        return os.fsencode(prompt).decode("utf-8")
    except UnicodeError as error:
        raise UserError(f"--prompt: {prompt!r} is not UTF-8 text: {error}") from error


def main(fv: flags.FlagValues) -> None:
    """Prints each prompt with its continuation; a single one as it is made."""
    sampling = Sampling(fv.temperature, fv.top_k, fv.top_p, fv.seed)
    texts = [_as_unicode(prompt) for prompt in fv.prompt]
    generator, tokenizer = load_generator(fv.checkpoint)
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    made = generator(prompts, fv.max_new_tokens, sampling)
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    if len(prompts) == 1:
        print(texts[0], end="", flush=True)
        for (ids,) in made:
            print(streams[0].add(ids), end="", flush=True)
        print(streams[0].add(np.array([], int), last=True))
        return
    for parts in made:
        for row, ids in enumerate(parts):
            texts[row] += streams[row].add(ids)
    for text, stream in zip(texts, streams, strict=True):
        print(text + stream.add(np.array([], int), last=True), end="\n\n")


if __name__ == "__main__":
    cli.run(main, define_flags)
