import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before JAX starts, and for the processes that tests start: one CPU as 8 devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# Many tests build the same programs, some in processes of their own.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

# The first example of a property compiles, the others do not: no time limit fits both.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` next to the repository, with material that is not ours to ship."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    return path
