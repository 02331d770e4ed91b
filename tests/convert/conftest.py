from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module", params=["learned", "binary", "affine"])
def interface(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(interface: str) -> tuple[Any, np.ndarray]:
    """A model of each interface and our logits of its ids."""
    from tests.convert.torch_models import make

    return make(interface)


@pytest.fixture
def model(made: tuple[Any, np.ndarray]) -> Any:
    """A model a test may change."""
    from convert.hf.modeling_fixbin import FixbinConfig, FixbinForCausalLM

    original = made[0]
    copy = FixbinForCausalLM(FixbinConfig.from_dict(original.config.to_dict()))
    copy.load_state_dict(original.state_dict())
    return copy.eval()
