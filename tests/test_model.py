import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixbin_jax.config import ComputeConfig, InputConfig, ModelConfig
from fixbin_jax.model import Params, Structure
from tests import tiny

INTERFACES = ("learned", "binary", "affine")


def structure(config: ModelConfig, **compute: object) -> Structure:
    return Structure(config, ComputeConfig(**compute), tiny.placement())


def with_interface(config: ModelConfig, interface: str) -> ModelConfig:
    return dataclasses.replace(config, input=InputConfig(interface=interface))


def logits(config: ModelConfig, params: Params, ids: np.ndarray, **compute: object) -> np.ndarray:
    decoder = structure(config, **compute).decoder
    return np.asarray(jax.jit(lambda params, ids: decoder(params)(ids))(params, ids))


def neox_params(config: ModelConfig, weights: dict[str, np.ndarray]) -> Params:
    """Our parameters from transformers' names, which fuse q, k and v head by head."""
    H, d = config.num_heads, config.head_width

    def layer(name: str) -> np.ndarray:
        return np.stack([weights[f"gpt_neox.layers.{i}.{name}"] for i in range(config.num_layers)])

    def linear(name: str) -> Params:
        return {"weight": layer(f"{name}.weight"), "bias": layer(f"{name}.bias")}

    fused = linear("attention.query_key_value")
    qkv = {}
    for i, name in enumerate(("query", "key", "value")):
        w = fused["weight"].reshape(-1, H, 3, d, config.width)[:, :, i]
        b = fused["bias"].reshape(-1, H, 3, d)[:, :, i]
        qkv[name] = {
            "weight": w.reshape(-1, config.width, config.width),
            "bias": b.reshape(-1, config.width),
        }
    head = weights.get("embed_out.weight", weights.get("lm_head.weight"))
    return {
        "input": {"table": weights["gpt_neox.embed_in.weight"]},
        "layers": {
            "attention_norm": linear("input_layernorm"),
            "attention": {**qkv, "out": linear("attention.dense")},
            "mlp_norm": linear("post_attention_layernorm"),
            "mlp": {
                "up": linear("mlp.dense_h_to_4h"),
                "down": linear("mlp.dense_4h_to_h"),
            },
        },
        "norm": {
            "weight": weights["gpt_neox.final_layer_norm.weight"],
            "bias": weights["gpt_neox.final_layer_norm.bias"],
        },
        "head": {"weight": head},
    }


@pytest.mark.parametrize(("gelu", "hidden_act"), [("erf", "gelu"), ("tanh", "gelu_pytorch_tanh")])
def test_equals_transformers_gpt_neox_at_every_position(gelu: str, hidden_act: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # Longer than two blocks of attention, and no size a multiple of another.
    config = ModelConfig(
        vocab_size=97,
        width=60,
        num_layers=3,
        num_heads=5,
        mlp_width=140,
        context_length=277,
        gelu=gelu,
        input=InputConfig("learned"),
    )
    torch.manual_seed(0)
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.hidden_width,
            max_position_embeddings=config.context_length,
            rotary_pct=1.0,
            use_parallel_residual=False,
            hidden_act=hidden_act,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            spread = 0.3 if weight.ndim == 1 else 1.5 / weight.shape[1] ** 0.5
            weight.add_(spread * torch.randn(weight.shape))
        ids = torch.randint(0, config.vocab_size, (2, config.context_length))
        expected = theirs(ids).logits.numpy()
    params = neox_params(config, {n: w.detach().numpy() for n, w in theirs.named_parameters()})
    assert np.abs(expected).max() > 3
    for scan_layers in (True, False):
        ours = logits(config, params, ids.numpy(), scan_layers=scan_layers)
        assert np.abs(ours - expected).max(axis=(0, 2)).max() < 1e-4


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_position_depends_on_itself_and_the_past_alone(interface: str) -> None:
    config = with_interface(tiny.MODEL, interface)
    params = structure(config).init(0)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 16))
    base = logits(config, params, ids)
    for position in (0, 7, 15):
        other = ids.copy()
        other[0, position] = (other[0, position] + 1) % config.vocab_size
        changed = np.abs(logits(config, params, other) - base).max(axis=(0, 2)) > 1e-6
        assert changed.tolist() == [p >= position for p in range(16)]


def test_reference_parameter_counts_without_allocating() -> None:
    counts = {i: structure(with_interface(ModelConfig(), i)).count() for i in INTERFACES}
    assert counts["learned"][0] - counts["binary"][0] == 67_108_864
    assert counts["affine"] == counts["binary"]
    assert [counts[i][1] for i in INTERFACES] == [67_108_864, 0, 0]
    # Twelve squares a layer, their biases and four norm vectors, a final norm, the head.
    width = 1024
    layer = 12 * width**2 + (4 + 4 + 1) * width + 4 * width
    assert counts["binary"][0] == 32 * layer + 2 * width + 65_536 * width


def test_interfaces_of_a_seed_share_every_other_weight() -> None:
    drawn = {i: structure(with_interface(tiny.MODEL, i)).init(3) for i in INTERFACES}
    table = drawn["learned"].pop("input")["table"]
    assert table.shape == (304, 32)
    for other in ("binary", "affine"):
        for name, value in tiny.leaves(drawn["learned"]).items():
            np.testing.assert_array_equal(value, tiny.leaves(drawn[other])[name], err_msg=name)


def test_biases_are_choices_that_start_at_zero() -> None:
    ids = np.arange(32).reshape(2, 16)
    full = dataclasses.replace(tiny.MODEL, head_bias=True)
    bare = dataclasses.replace(tiny.MODEL, linear_bias=False, norm_bias=False)
    params, without = structure(full).init(0), structure(bare).init(0)
    biases = {name for name in tiny.leaves(params) if name.endswith("bias")}
    assert set(tiny.leaves(params)) - set(tiny.leaves(without)) == biases
    np.testing.assert_array_equal(logits(full, params, ids), logits(bare, without, ids))


def test_every_parameter_reaches_the_logits() -> None:
    config = dataclasses.replace(tiny.MODEL, head_bias=True, input=InputConfig("learned"))
    s = structure(config)
    params = tiny.randomised(s.init(0))
    ids = np.arange(config.vocab_size).reshape(-1, 16)
    gradients = jax.jit(jax.grad(lambda p: jnp.square(s.decoder(p)(ids)).mean()))(params)
    for name, gradient in tiny.leaves(gradients).items():
        # Every layer, and every row of the table; of keys' biases only rotation leaves a trace.
        slices = np.abs(gradient).reshape(gradient.shape[0], -1).max(axis=1)
        assert slices.min() > 1e-7, name


def test_scan_and_unrolled_layers_give_the_same_logits() -> None:
    params = tiny.randomised(structure(tiny.MODEL).init(0))
    ids = np.arange(32).reshape(2, 16)
    scanned = logits(tiny.MODEL, params, ids, scan_layers=True)
    unrolled = logits(tiny.MODEL, params, ids, scan_layers=False)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-5)


def test_compute_dtype_is_that_of_the_products_and_parameters_stay_float32() -> None:
    params = structure(tiny.MODEL).init(0)
    ids = np.arange(32).reshape(2, 16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    full, half = (logits(tiny.MODEL, params, ids, dtype=d) for d in ("float32", "bfloat16"))
    assert half.dtype == np.float32
    # bfloat16 keeps 8 bits: far from exact, and not far off.
    assert 1e-4 < np.abs(half - full).max() / np.abs(full).max() < 5e-2


def test_remat_keeps_less_for_the_backward_pass() -> None:
    config = dataclasses.replace(tiny.MODEL, num_layers=8, context_length=128)
    ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)

    def temporary_bytes(remat: str) -> int:
        s = structure(config, remat=remat)

        def loss(params: Params, ids: jax.Array) -> jax.Array:
            return s.decoder(params).hidden(ids).sum()

        compiled = jax.jit(jax.grad(loss)).lower(s.shapes, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, full = (temporary_bytes(r) for r in ("none", "dots", "full"))
    assert full < 0.7 * dots
    assert dots < 0.9 * none


def test_no_array_as_long_as_the_vocabulary_but_the_head() -> None:
    config = dataclasses.replace(tiny.MODEL, vocab_size=65_536, width=32)
    for interface in ("binary", "affine"):
        s = structure(with_interface(config, interface))
        named = {n: x.shape for n, x in tiny.leaves(s.shapes).items()}
        assert [n for n, shape in named.items() if 65_536 in shape] == ["head.weight"]
