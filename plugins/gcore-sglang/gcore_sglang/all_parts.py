"""Has SGLang answer a push when all processes of a split model have read the bucket.

By itself it answers when the first one has, and the others may find that the file is gone.
"""

from __future__ import annotations

from typing import Any

import torch


def wait_for_all_parts() -> None:
    """Changes SGLang in this process, which must be one that runs a model."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components import weight_updater

    manager: Any = weight_updater.SchedulerWeightUpdaterManager
    update = manager.update_weights_from_disk

    def waiting(self: Any, request: Any) -> Any:
        answer = update(self, request)
        if _all_did(self.tp_cpu_group, answer.success) or not answer.success:
            return answer
        return io_struct.UpdateWeightFromDiskReqOutput(
            success=False,
            message="another process of the split model did not take it.",
            num_paused_requests=0,
        )

    manager.update_weights_from_disk = waiting


def _all_did(group: Any, success: bool) -> bool:
    """Returns whether all processes of a group had success; waits for all of them."""
    succeeded = torch.tensor([int(success)])
    torch.distributed.all_reduce(succeeded, torch.distributed.ReduceOp.MIN, group=group)
    return bool(succeeded)
