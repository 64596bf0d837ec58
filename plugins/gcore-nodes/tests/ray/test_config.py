"""Settings that cannot be meant are refused with what to write in their place."""

from __future__ import annotations

import pytest
from gcore_nodes.ray.config import RayConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": "ray://10.0.0.1:10001"}, "`ray job submit` brings it there"),
        ({"cluster": "head"}, "cluster must be auto or HOST:PORT, not 'head'"),
        ({"cluster": "6379"}, "cluster must be auto or HOST:PORT, not '6379'"),
        ({"address": "10.0.0.1:6379"}, "the address of the Ray cluster is set by cluster"),
        ({"address": "auto"}, "the address of the Ray cluster is set by cluster"),
        ({"nodes": 0}, "nodes must be positive"),
        ({"min_nodes": 0}, "min_nodes must be positive"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes is 3, and nodes is 2"),
        ({"wait_s": 0.0}, "wait_s must be positive"),
        ({"resources": {"GPU": 0.0}}, "leave it out, as Ray drops resources of 0"),
        ({"resources": {"GPU": 1.5}}, "resources above 1 must be whole, not GPU: 1.5"),
        ({"patience_s": 1.0}, "patience_s must be at least 8"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        RayConfig(**settings)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_every_setting_has_a_default() -> None:
    config = RayConfig()
    assert (config.cluster, config.nodes, config.resources) == ("auto", None, {})
    RayConfig(cluster="10.0.0.1:6379", address="10.0.0.0/16", resources={"GPU": 8, "fast": 0.5})
