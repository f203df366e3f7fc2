"""Metrics of the example configs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class BitsPerCharacter(BaseMetric):
    """Mean loss over all scored characters, beside what counting achieves on the same characters.

    Expects of the model, for each window, ``dict(nll=float, characters=int)``: the summed negative log-likelihood in
    nats, and over how many characters. Windows are weighted by their characters.

    Logged: ``loss`` (nats per character), ``bpc`` (bits per character), and the data set's ``unigram_bpc`` and
    ``bigram_bpc`` where its ``metainfo`` has them.
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep what the model says about each window."""
        self.results.extend((sample["nll"], sample["characters"]) for sample in data_samples)

    def compute_metrics(self, results: list[tuple[float, int]]) -> dict[str, float]:
        """Divide the summed loss by the characters; the figures of the class docstring."""
        nats = sum(nll for nll, _ in results) / sum(characters for _, characters in results)
        figures = {"loss": nats, "bpc": nats / math.log(2)}
        meta = self.dataset_meta or {}
        return figures | {name: meta[name] for name in ("unigram_bpc", "bigram_bpc") if name in meta}


@METRICS.register_module()
class TopOneAccuracy(BaseMetric):
    """Share of right predictions, in percent.

    Expects of the model, for each sample, ``dict(predicted=int, target=int)``. Logged: ``accuracy`` in [0, 100].
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep whether each prediction is right."""
        self.results.extend(sample["predicted"] == sample["target"] for sample in data_samples)

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        """The share of right predictions."""
        return {"accuracy": 100.0 * sum(results) / len(results)}
