"""One bundle a node is asked for, and what Ray lacks is said with the nodes that lack it."""

from __future__ import annotations

import pytest
from gcore_nodes.ray.bundles import (
    Bundle,
    RayNode,
    addresses_of,
    bundles,
    free_now,
    in_order,
    shortage,
)


def node(number: int, cpus: float = 0, gpus: float = 0, **free: float) -> RayNode:
    address = f"10.0.0.{number}"
    total = {"CPU": cpus, "GPU": gpus, "memory": 1e9, f"node:{address}": 1.0}
    total = {name: amount for name, amount in total.items() if amount}
    return RayNode(address=address, total=total, free={**total, **free})


HEAD = node(1, cpus=4)
LARGE = node(2, cpus=64, gpus=8)
SMALL = node(3, cpus=32, gpus=4)


def pinned(number: int, **amounts: float) -> Bundle:
    return {**amounts, f"node:10.0.0.{number}": 0.001}


@pytest.mark.parametrize(
    ("nodes", "count", "resources", "expected"),
    [
        ([HEAD], None, {}, [pinned(1, CPU=4)]),
        (
            [HEAD, LARGE, SMALL],
            None,
            {},
            [pinned(2, CPU=64, GPU=8), pinned(3, CPU=32, GPU=4)],
        ),
        ([HEAD, node(4, cpus=8)], None, {}, [pinned(1, CPU=4), pinned(4, CPU=8)]),
        ([node(5)], None, {}, [pinned(5)]),  # started with --num-cpus=0
        ([HEAD, SMALL, LARGE], 2, {}, [{"CPU": 32, "GPU": 4}] * 2),
        ([HEAD, SMALL, LARGE], 1, {}, [{"CPU": 64, "GPU": 8}]),
        ([LARGE], 3, {}, [{"CPU": 64, "GPU": 8}] * 3),  # an autoscaler may add two
        ([HEAD, LARGE, SMALL], None, {"GPU": 8.0}, [{"GPU": 8.0}]),
        ([HEAD], 2, {"GPU": 8.0}, [{"GPU": 8.0}] * 2),
    ],
)
def test_one_bundle_a_node(
    nodes: list[RayNode], count: int | None, resources: Bundle, expected: list[Bundle]
) -> None:
    assert bundles(nodes, count, resources) == (expected, "")


@pytest.mark.parametrize(
    ("nodes", "resources", "why"),
    [
        ([], {}, "none of 0 nodes of the cluster has what is asked for"),
        ([HEAD, LARGE], {"GPU": 16.0}, "none of 2 nodes of the cluster has what is asked for"),
    ],
)
def test_no_node_will_do(nodes: list[RayNode], resources: Bundle, why: str) -> None:
    assert bundles(nodes, None, resources) == ([], why)


def test_what_can_be_had_at_once_is_pinned_to_the_nodes_that_have_it() -> None:
    """A busy node is left out, and no more nodes are taken than were asked for."""
    busy = node(2, cpus=64, gpus=8, GPU=1.0)
    nodes = [node(10, gpus=8), node(9, gpus=8), busy]
    assert free_now([{"GPU": 8.0}] * 3, nodes) == [pinned(9, GPU=8), pinned(10, GPU=8)]
    assert free_now([{"GPU": 8.0}], nodes) == [pinned(9, GPU=8)]
    assert free_now([pinned(2, GPU=8.0)], nodes) == []


def test_pins_name_their_nodes() -> None:
    made, _ = bundles([LARGE, SMALL], None, {})
    assert addresses_of(made) == ["10.0.0.2", "10.0.0.3"]
    assert addresses_of([{"CPU": 1.0}]) == []


def test_what_is_missing_is_said_with_the_nodes_that_lack_it() -> None:
    made = [{"GPU": 8.0, "CPU": 8.0}] * 2
    text = shortage(made, [HEAD, LARGE, node(3, cpus=32, gpus=8, GPU=2.0)])
    assert text == (
        "2 nodes with GPU 8, CPU 8 free are asked for; Ray has 1; "
        "10.0.0.1 has GPU 0 of 8, CPU 4 of 8; 10.0.0.3 has GPU 8, of which 2 free"
    )


def test_a_node_that_is_wanted_whole_and_is_in_use() -> None:
    busy = node(2, cpus=8, CPU=5.0)
    made, _ = bundles([HEAD, busy], None, {})
    assert shortage(made, [HEAD, busy]) == (
        "2 nodes of 2 are asked for, each whole; Ray has 1; 10.0.0.2 has CPU 8, of which 5 free"
    )


def test_no_more_than_four_nodes_are_listed() -> None:
    text = shortage([{"GPU": 1.0}], [node(number, cpus=1) for number in range(1, 8)])
    assert text.endswith("10.0.0.4 has GPU 0 of 1; and 3 more")


def test_nodes_are_in_the_order_of_their_addresses_not_of_their_letters() -> None:
    assert in_order(["10.0.0.10", "10.0.0.9", "10.0.0.1"]) == [2, 1, 0]
