"""A decoder whose input is a trained table, the bits of the token's id, or an affine code of them.

Language models need no trained input table: the 16 bits of a token's id, repeated to the model's
width, are enough (A. Bochkov 2026, arXiv 2605.09751). This file is all that a checkpoint needs
besides torch and transformers 4.50 or later.

Letters in shapes: B batch, L new positions, S all positions, H heads, D width, K code bits.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

# Later releases of transformers 5 renamed the cache of keys and values, in calls and in outputs.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


class FixbinConfig(PretrainedConfig):
    """Sizes and choices of a model; the defaults are the paper's. ValueError names a bad key.

    Args:
      hidden_act: "gelu" (by erf) or "gelu_pytorch_tanh".
      input_interface: "learned" (a trained table), "binary" (the id's bits) or "affine" (A c + b
        over GF(2), c being the id's bits).
      code_width: K, bits of the code; None is ceil(log2(vocab_size)).
      lift: how a code fills the width: "tile" repeats the whole code, "interleave" each bit.
      zero_ids: ids whose code is all zero.
    """

    model_type = "fixbin"
    keys_to_ignore_at_inference = [CACHE]

    def __init__(
        self,
        vocab_size=65_536,
        hidden_size=1024,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=4096,
        max_position_embeddings=1024,
        layer_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_parameters=None,
        hidden_act="gelu",
        linear_bias=True,
        norm_bias=True,
        head_bias=False,
        initializer_range=0.02,
        input_interface="binary",
        code_width=None,
        lift="tile",
        zero_ids=(),
        tie_word_embeddings=False,
        use_cache=True,
        **kwargs,
    ):
        if tie_word_embeddings:
            raise ValueError("tie_word_embeddings: true; a fixbin model's head is its own")
        for key, value, allowed in (
            ("hidden_act", hidden_act, ("gelu", "gelu_pytorch_tanh")),
            ("input_interface", input_interface, ("learned", "binary", "affine")),
            ("lift", lift, ("tile", "interleave")),
        ):
            if value not in allowed:
                raise ValueError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
        bits = (vocab_size - 1).bit_length()
        code_width = bits if code_width is None else code_width
        if input_interface != "learned" and not bits <= code_width <= hidden_size:
            raise ValueError(
                f"code_width: {code_width}, expected {bits} (for {vocab_size} ids) to {hidden_size}"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        # transformers 4 knows the first by name, 5 the second.
        self.rope_theta = (rope_parameters or {}).get("rope_theta", rope_theta)
        self.rope_parameters = {"rope_type": "default", "rope_theta": self.rope_theta}
        self.hidden_act = hidden_act
        self.linear_bias = linear_bias
        self.norm_bias = norm_bias
        self.head_bias = head_bias
        self.initializer_range = initializer_range
        self.input_interface = input_interface
        self.code_width = code_width
        self.lift = lift
        self.zero_ids = list(zero_ids)
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=False, **kwargs)


def parity(x):
    """1 where an int64 below 2^32 has an odd number of ones, else 0."""
    for shift in (16, 8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1


class InputInterface(nn.Module):
    """Ids [B, L] to vectors [B, L, D]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.input_interface == "affine":
            bits = (config.vocab_size - 1).bit_length()
            # Until A and b are loaded: the id's own bits.
            identity = torch.eye(config.code_width, bits, dtype=torch.uint8)
            self.register_buffer("matrix", identity)
            self.register_buffer("shift", torch.zeros(config.code_width, dtype=torch.uint8))
        elif config.input_interface == "binary":
            self.embedding = nn.Embedding.from_pretrained(self.codebook(config.vocab_size))
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)

    def codebook(self, vocab_size):
        """[vocab_size, K], torch's default dtype: row t the bits of t, zeros for zero_ids."""
        codes = torch.arange(vocab_size)[:, None] >> torch.arange(self.config.code_width) & 1
        codes[self.config.zero_ids] = 0
        return codes.to(torch.get_default_dtype())

    def forward(self, ids, dtype):
        if self.config.input_interface == "learned":
            return self.embedding(ids)
        if self.config.input_interface == "binary":
            return self.lift(self.embedding(ids)).to(dtype)
        # Row i of A as an integer: bit i of A c is the parity of the id's bits that it selects.
        place = torch.arange(self.matrix.shape[1], device=ids.device)
        rows = (self.matrix.long() << place).sum(-1)
        codes = parity(ids.long()[..., None] & rows) ^ self.shift.long()
        if self.config.zero_ids:
            zero = torch.isin(ids, torch.tensor(self.config.zero_ids, device=ids.device))
            codes = codes.masked_fill(zero[..., None], 0)
        return self.lift(codes).to(dtype)

    def lift(self, codes):
        """[..., K] to [..., D], without parameters."""
        width, code_width = self.config.hidden_size, codes.shape[-1]
        place = torch.arange(width, device=codes.device)
        tile = self.config.lift == "tile"
        return codes[..., place % code_width if tile else place * code_width // width]


def rotate(x, cos, sin):
    """Rotary positions, in float32: dimension i of a head turns with i + half the head's width."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over [B, L, D]."""

    def __init__(self, config, layer):
        super().__init__()
        width, bias = config.hidden_size, config.linear_bias
        self.num_heads, self.layer = config.num_attention_heads, layer
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x, cos, sin, mask, cache):
        def heads(linear):
            return linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k = rotate(heads(self.query), cos, sin), rotate(heads(self.key), cos, sin)
        v = heads(self.value)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """D -> intermediate_size, GELU, -> D."""

    def __init__(self, config):
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.linear_bias
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.approximate = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}[config.hidden_act]

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def norm(config):
    """Layer normalisation over the width."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config, layer)
        self.mlp_norm, self.mlp = norm(config), MLP(config)

    def forward(self, x, cos, sin, mask, cache):
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class FixbinForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its head.

    For `affine`, get_input_embeddings() is None: there is no table. A new affine model's A is the
    identity and its b zero, which is the id's own bits. Static caches are refused.
    """

    config_class = FixbinConfig
    _supports_sdpa = True
    _supports_cache_class = True
    # Else transformers 4.50 takes every tensor's dtype to be right if the first one's is: A's is.
    _supports_param_buffer_assignment = False
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.input = InputInterface(config)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """As in transformers, but what a checkpoint lacks is not filled at random."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            raise ValueError(f"the checkpoint lacks {', '.join(sorted(info['missing_keys']))}")
        if model.config.input_interface == "binary":
            # transformers 5 makes every tensor that it loads trainable.
            model.input.embedding.requires_grad_(False)
        return (model, info) if output_loading_info else model

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.requires_grad:
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self):
        return getattr(self.input, "embedding", None)

    def set_input_embeddings(self, value):
        if self.config.input_interface != "learned":
            raise ValueError("set_input_embeddings: the input is a function of the id, not a table")
        self.input.embedding = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, **options):
        """Resizes the head, and with it the table, the codebook or the bits that A reads.

        Raises:
          ValueError: where codes of so few bits cannot tell so many ids apart.
        """
        if self.config.input_interface == "learned":
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, **options)
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size == self.config.vocab_size:
            return self.get_input_embeddings()
        affine = self.config.input_interface == "affine"
        bits = self.input.matrix.shape[1] if affine else self.config.code_width
        if size > 1 << bits:
            raise ValueError(f"resize_token_embeddings: {size}, but codes tell {1 << bits} apart")
        self.head = self._get_resized_lm_head(self.head, size, **options)
        self.config.vocab_size = size
        self.config.zero_ids = [i for i in self.config.zero_ids if i < size]
        if affine:
            self.input.matrix = self.input.matrix[:, : (size - 1).bit_length()].clone()
        else:
            codes = self.input.codebook(size).to(self.input.embedding.weight)
            self.input.embedding = nn.Embedding.from_pretrained(codes)
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Logits [B, L, V], and with labels the mean loss of predicting each next label.

        Args:
          input_ids: [B, L]; or inputs_embeds [B, L, D], vectors of the model's width.
          attention_mask: [B, S], 0 at padding, which may stand at either end.
          cache: keys and values of earlier positions; past_key_values is its older name.
          labels: [B, L], -100 where nothing is to be predicted; shifted here.
          output_hidden_states: also return the input, each layer's output, the last one normed.
          logits_to_keep: without labels, only the last so many positions' logits; 0 for all.
          num_items_in_batch: divides the summed loss instead of the number of labels here.

        Raises:
          ValueError: naming the argument that cannot be used.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = inputs_embeds if input_ids is None else self.input(input_ids, self.norm.weight.dtype)
        cache = past_key_values if cache is None else cache
        if getattr(cache, "is_compileable", False):
            raise ValueError("cache: a static cache is not supported; use the default, dynamic one")
        checkpointed = self.gradient_checkpointing and self.training
        if checkpointed:
            # A layer that runs again for the backward pass would fill a cache twice, and its
            # weights get no gradient in reentrant checkpoints unless its input wants one.
            cache, use_cache = None, False
            if torch.is_grad_enabled() and not x.requires_grad:
                x.requires_grad_()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())
        mask, positions = self._mask_and_positions(x, past, attention_mask)
        cos, sin = self._rotation(positions if position_ids is None else position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [x]
        for layer in self.layers:
            if checkpointed:
                x = self._gradient_checkpointing_func(layer.__call__, x, cos, sin, mask, None)
            else:
                x = layer(x, cos, sin, mask, cache)
            if output_hidden_states:
                states.append(x)
        x = states[-1] = self.norm(x)
        logits = self.head(x[:, -logits_to_keep:] if labels is None else x)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].to(logits.device).flatten()
            total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")
            counted = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / counted
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=tuple(states) if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _mask_and_positions(self, x, past, attention_mask):
        """Which positions each new one sees, [B or 1, 1, L, S] or None for all before it, and
        where each new one stands in its sequence, [B or 1, L].
        """
        batch, length = x.shape[:2]
        column = torch.arange(past + length, device=x.device)
        row = column[past:, None]
        if attention_mask is None:
            return (None if past == 0 else (column <= row)[None, None]), column[None, past:]
        if attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask: shape {tuple(attention_mask.shape)}, expected "
                f"{(batch, past + length)}, of which the cache holds {past} positions"
            )
        seen = attention_mask.bool()
        positions = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        # A position of padding sees itself, so that no softmax is over nothing.
        return (column <= row) & seen[:, None, None] | (column == row), positions

    def _rotation(self, position_ids):
        """float32 cosines and sines [B or 1, 1, L, half a head's width] of the rotary angles."""
        width = self.config.hidden_size // self.config.num_attention_heads
        power = torch.arange(0, width, 2, device=position_ids.device).float() / width
        angle = position_ids[:, None, :, None].float() * self.config.rope_theta**-power
        return angle.cos(), angle.sin()


FixbinConfig.register_for_auto_class()
FixbinForCausalLM.register_for_auto_class("AutoModelForCausalLM")
