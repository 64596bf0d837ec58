"""Makes the rows of samples that show a few evaluated records to a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.records import Header
from gcore_core.runtime.store.client import StoreReader


def shown_rows(
    headers: Iterable[Header], reader: StoreReader, dataset: Dataset
) -> Iterator[dict[str, Any]]:
    """Yields the rows of ``samples/step_*.jsonl``.

    A row has prompt, text, rewards, mode ("greedy" or "sampled") and status. A record with pictures
    has ``arrays`` too: name -> each column or medium that is uint8[H, W, C]. Records without
    columns are left out.
    """
    for header in headers:
        if header.columns is None:
            continue
        columns = reader.open(header.columns)[header.slot]
        media = {name: reader.open_array(ref) for name, ref in header.media.items()}
        pictures = {
            n: a for n, a in {**columns, **media}.items() if a.dtype == np.uint8 and a.ndim == 3
        }
        prompt = dataset[header.row]
        text = columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else ""
        yield {
            "prompt": prompt.text if prompt.text is not None else prompt.messages,
            "text": text,
            "rewards": header.rewards,
            "mode": ("greedy", "sampled")[(-header.ordinal - 1) % 2],
            "status": header.status,
        } | ({"arrays": pictures} if pictures else {})
