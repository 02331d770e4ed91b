import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixbin_jax.config import (
    ComputeConfig,
    Config,
    DataConfig,
    InputConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from fixbin_jax.config_dict import changes, from_mapping, to_config_dict, to_mapping
from fixbin_jax.errors import UserError
from tests import tiny

AFFINE = InputConfig("affine", row_masks=tuple(1 << i for i in range(9)), shift=5, zero_ids=(3,))


@pytest.mark.parametrize("config", [Config(), tiny.change(tiny.CONFIG, model={"input": AFFINE})])
def test_a_config_survives_json_and_a_config_dict(config: Config) -> None:
    assert from_mapping(Config, json.loads(json.dumps(to_mapping(config)))) == config
    assert from_mapping(Config, to_config_dict(config)) == config


def test_the_config_dict_is_locked_and_none_can_be_set() -> None:
    config = to_config_dict(Config())
    with pytest.raises(AttributeError, match="num_layers"):
        config.model.n_layers = 3
    assert config.model.mlp_width is None
    config.model.mlp_width = 100
    assert from_mapping(Config, config).model.hidden_width == 100


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"modle": {}}, "config.modle: no such key; did you mean config.model"),
        ({"model": {"input": {"lifts": "tile"}}}, "config.model.input.lifts: .*input.lift"),
        ({"model": 3}, "config.model: found 3, expected a group of keys"),
        ({"model": {"width": "64"}}, r"config.model.width: found '64' \(str\), expected int"),
        ({"model": {"width": True}}, r"config.model.width: found True \(bool\), expected int"),
        ({"model": {"width": 64.0}}, r"config.model.width: found 64.0 \(float\), expected int"),
        ({"model": {"input": {"zero_ids": 5}}}, "zero_ids: found 5, expected a sequence"),
        ({"model": {"mlp_width": "none"}}, "mlp_width: found 'none'"),
    ],
)
def test_what_is_no_config_is_refused_by_key(mapping: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_mapping(Config, mapping)


def test_an_integer_is_taken_where_a_number_is_meant() -> None:
    config = from_mapping(Config, {"optimizer": {"weight_decay": 1}})
    assert config.optimizer.weight_decay == 1.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ModelConfig(width=30, num_heads=4), "width: 30 is not divisible .*num_heads = 4"),
        (lambda: ModelConfig(width=36, num_heads=4), "head width of 9"),
        (lambda: ModelConfig(width=8, num_heads=1), "width: 8 cannot hold a code of 16 bits"),
        (lambda: ModelConfig(vocab_size=1), "model.vocab_size: 1"),
        (lambda: ModelConfig(num_layers=0), "model.num_layers: 0"),
        (lambda: ModelConfig(mlp_width=0), "model.mlp_width: 0"),
        (lambda: ModelConfig(gelu="new"), "model.gelu: 'new' is not one of erf, tanh"),
        (lambda: ModelConfig(vocab_size=300, input=InputConfig(zero_ids=(300,))), "zero_ids"),
        (lambda: ModelConfig(input=InputConfig("affine", code_width=9)), "code_width"),
        (lambda: ModelConfig(input=InputConfig("affine", row_masks=(1, 1))), "row_masks.* rank 1"),
        (lambda: InputConfig("binary", shift=1), "shift and code_width are for .*'binary'"),
        (lambda: InputConfig("affine", shift=1), "shift: given without .*row_masks"),
        (lambda: InputConfig("affine", code_width=3, row_masks=(1, 2)), "3, but row_masks has 2"),
        (lambda: InputConfig("table"), "interface: 'table' is not one of"),
        (lambda: DataConfig(eval_fraction=float("nan")), "eval_fraction: nan"),
        (lambda: DataConfig(sources=" "), "data.sources: empty"),
        (lambda: TrainConfig(batch_size=10, micro_batches=3), "10 is not divisible .* = 3"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "learning_rate: nan"),
        (lambda: OptimizerConfig(beta1=1.5), "beta1: 1.5"),
        (lambda: ComputeConfig(remat="some"), "remat: 'some' is not one of none, dots, full"),
    ],
)
def test_a_config_that_cannot_be_is_refused(build, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=words):
        build()


@given(st.integers(2, 70_000), st.integers(0, 5))
def test_an_affine_code_of_a_seed_can_be_written_down_and_given_back(size: int, seed: int) -> None:
    drawn = ModelConfig(vocab_size=size, input=InputConfig("affine", affine_seed=seed)).code
    assert drawn is not None
    written = InputConfig("affine", row_masks=drawn.row_masks, shift=drawn.shift)
    assert ModelConfig(vocab_size=size, input=written).code == drawn


def test_changes_name_what_makes_another_run_and_nothing_else() -> None:
    other = tiny.change(
        tiny.CONFIG,
        model={"num_layers": 3, "input": InputConfig(zero_ids=(7,))},
        optimizer={"learning_rate": 1.0},
        compute={"remat": "full"},
        log={"interval": 7},
        mesh={"fsdp": 4},
    )
    assert changes(tiny.CONFIG, other) == [
        "config.model.num_layers: 2 -> 3",
        "config.model.input.zero_ids: [] -> [7]",
        "config.optimizer.learning_rate: 0.0003 -> 1.0",
    ]
    assert changes(tiny.CONFIG, tiny.change_whole(tiny.CONFIG, mesh=MeshConfig(4, 2, 1))) == []
