"""Is a cloud for Ray's autoscaler: its machines are those of a test that have no Ray yet.

Ray's monitor on the head makes it from the autoscaler's configuration, where it is the provider.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)


class MachinesProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    """Starts Ray on one machine after the other, as the autoscaler asks for nodes.

    Of its settings, "commands" has for each machine what leads there, what starts Ray, and a log.
    """

    def _create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        with self.lock:
            shell, start, log = self.provider_config["commands"][self._next_node_id]
            number = self._next_hex_node_id()
            own = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": number, "RAY_CLOUD_INSTANCE_ID": number}
            own["RAY_NODE_TYPE_NAME"] = tags[TAG_RAY_USER_NODE_TYPE]
            settings = [f"{name}={value}" for name, value in own.items()]
            with Path(log).open("wb") as output:
                process = subprocess.Popen(
                    [*shell, "env", *settings, *start], stdout=output, stderr=output
                )
            its_tags = {
                TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                TAG_RAY_NODE_NAME: number,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
            self._nodes[number] = {"tags": its_tags | tags, "node": process}

    def _terminate_node(self, node: dict[str, Any]) -> None:
        node["node"].kill()  # the machine's end ends Ray there
