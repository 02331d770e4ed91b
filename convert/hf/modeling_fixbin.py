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


class FixbinConfig(PretrainedConfig):
    """Sizes and choices of a model; the defaults are the paper's.

    Args:
      hidden_act: "gelu" (by erf) or "gelu_pytorch_tanh".
      input_interface: "learned" (a trained table), "binary" (the id's bits) or "affine" (A c + b
        over GF(2), c being the id's bits).
      code_width: K, bits of the code.
      lift: how a code fills the width: "tile" repeats the whole code, "interleave" each bit.
      zero_ids: ids whose code is all zero.
    """

    model_type = "fixbin"
    keys_to_ignore_at_inference = ["past_key_values"]

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
        code_width=16,
        lift="tile",
        zero_ids=(),
        tie_word_embeddings=False,
        use_cache=True,
        **kwargs,
    ):
        if tie_word_embeddings:
            raise ValueError("tie_word_embeddings: true; a fixbin model's head is its own")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        # transformers 5 writes the second and drops the first, 4 keeps both.
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


def id_bits(ids, count):
    """int64 [..., count]: the bits of ids, least significant first."""
    return (ids[..., None] >> torch.arange(count, device=ids.device)) & 1


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
        """float32 [vocab_size, K]: row t holds the bits of t, the rows of zero_ids zeros."""
        codes = id_bits(torch.arange(vocab_size), self.config.code_width).float()
        codes[[i for i in self.config.zero_ids if i < vocab_size]] = 0
        return codes

    def forward(self, ids, dtype):
        if self.config.input_interface == "learned":
            return self.embedding(ids)
        if self.config.input_interface == "binary":
            return self.lift(self.embedding(ids)).to(dtype)
        bits = id_bits(ids, self.matrix.shape[1])
        # Sums of bits are small integers, exact in float32; their parity is the sum over GF(2).
        sums = bits.float() @ self.matrix.float().T
        codes = (sums.long() + self.shift.long()) & 1
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
    """Rotary positions: dimension i of a head turns with i + half the head's width."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


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

        query, key = rotate(heads(self.query), cos, sin), rotate(heads(self.key), cos, sin)
        value = heads(self.value)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
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

    For `affine`, get_input_embeddings() is None: there is no table.
    """

    config_class = FixbinConfig
    _supports_sdpa = True
    _supports_cache_class = True
    _supports_static_cache = False
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
        return (model, info) if output_loading_info else model

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding) and module.weight.requires_grad:
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def get_input_embeddings(self):
        return getattr(self.input, "embedding", None)

    def set_input_embeddings(self, value):
        if self.config.input_interface != "learned":
            raise ValueError(
                f"set_input_embeddings: the input of a {self.config.input_interface} model is a "
                "function of the id"
            )
        self.input.embedding = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        """Resizes the head, and the table or the codebook; codes reach no further than 2^K ids."""
        interface = self.config.input_interface
        if interface == "learned" or new_num_tokens is None:
            return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        bits = self.config.code_width if interface == "binary" else self.input.matrix.shape[1]
        if new_num_tokens > 1 << bits:
            raise ValueError(
                f"resize_token_embeddings: {new_num_tokens} ids, but codes of {bits} bits tell "
                f"{1 << bits} apart"
            )
        old = self.head.weight
        rows = min(new_num_tokens, len(old))
        self.head = self._get_resized_lm_head(self.head, new_num_tokens)
        assert torch.equal(self.head.weight[:rows], old[:rows])
        self.config.vocab_size = new_num_tokens
        if interface == "binary":
            weight = self.input.codebook(new_num_tokens).to(old.device, old.dtype)
            self.input.embedding = nn.Embedding.from_pretrained(weight)
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Logits [B, L, V], and with labels the mean loss of predicting each next label.

        Args:
          input_ids: [B, L]; or inputs_embeds [B, L, D], vectors of the model's width.
          attention_mask: [B, S], 0 at padding, which may stand at either end.
          labels: [B, L], -100 where nothing is to be predicted; shifted here.
          logits_to_keep: only the last so many positions' logits; 0 for all.
          num_items_in_batch: divides the summed loss instead of the number of labels here.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = inputs_embeds
        if x is None:
            x = self.input(input_ids, self.head.weight.dtype)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        length = x.shape[1]
        column = torch.arange(past + length, device=x.device)
        row = column[past:, None]
        mask = (column <= row)[None, None]
        if attention_mask is not None:
            seen = attention_mask.bool()
            # A query at padding sees itself, so that no softmax is over nothing.
            mask = (mask & seen[:, None, None]) | (column == row)
            if position_ids is None:
                position_ids = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        if position_ids is None:
            position_ids = column[None, past:]
        cos, sin = self._rotation(position_ids, x.dtype)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, cos, sin, mask, None)
            else:
                x = layer(x, cos, sin, mask, past_key_values if use_cache else None)
        x = self.norm(x)
        logits = self.head(x[:, -logits_to_keep:] if labels is None else x)
        loss = None
        if labels is not None:
            total = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
            )
            counted = num_items_in_batch
            loss = total / ((labels[:, 1:] != -100).sum() if counted is None else counted)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None
        )

    def _rotation(self, position_ids, dtype):
        """Cosines and sines [B, 1, L, half a head's width] of the rotary angles."""
        width = self.config.hidden_size // self.config.num_attention_heads
        power = torch.arange(0, width, 2, device=position_ids.device).float() / width
        angle = position_ids[:, None, :, None].float() * self.config.rope_theta**-power
        return angle.cos().to(dtype), angle.sin().to(dtype)


FixbinConfig.register_for_auto_class()
FixbinForCausalLM.register_for_auto_class("AutoModelForCausalLM")
