"""Reads the router's state for the live page: the one place that does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from router.admission.controller import AdmissionController
from router.api.admin import PoolsService
from router.api.live.merge_patch import Json
from router.api.live.state import PoolReading, Reading
from router.autoscaler.observation import samples_of
from router.metrics import RouterMetrics
from router.request.request_log import RequestLog
from router.request.validation import ServedModel


@dataclass(eq=False)
class RouterReader:
    """Belongs to the router's event loop."""

    model: ServedModel
    operations: PoolsService
    admission: AdmissionController
    metrics: RouterMetrics
    log: RequestLog
    is_serving: Callable[[], bool]

    async def read(self) -> Reading:
        sizes = await self.operations.sizes()  # first: everything after it is one snapshot
        safeguards, autoscaler, resizer = (
            self.operations.safeguards,
            self.operations.autoscaler,
            self.operations.resizer,
        )
        by_role = safeguards.pools.by_role
        statuses = autoscaler.status.pools if autoscaler is not None else {}
        return Reading(
            at_s=time.time(),
            now_s=time.monotonic(),
            router=self._router(),
            pools={
                role: PoolReading(pool.num_ready(), sizes.get(role), statuses.get(role))
                for role, pool in by_role.items()
            },
            instances=[
                (role, instance.address, sample, self.operations.out(role, instance) or "")
                for role, pool in by_role.items()
                for instance, sample in zip(pool.instances, samples_of(role, safeguards), strict=True)
            ],
            running=[trace.summary() for trace in self.log.running.values()],
            ended=self.log.ended,
            changes=tuple(resizer.recent) if resizer is not None else (),
        )

    def _router(self) -> Json:
        admission, tokenizer, metrics = self.admission, self.model.tokenizer, self.metrics
        return {
            "model": self.model.name,
            "version": version("tandem-llm"),
            "chat": tokenizer is not None and tokenizer.chat_template is not None,
            "serving": self.is_serving(),
            "resizable": self.operations.resizer is not None,
            "in_flight": admission.in_use.num_requests,
            "queued": admission.num_queued,
            "received": metrics.num_received,
            "ended": dict(metrics.ended),
            "rejected": dict(admission.num_rejected),
            "prompt_tokens": metrics.num_prompt_tokens,
            "output_tokens": metrics.num_output_tokens,
            "retried": metrics.num_retried,
            "resumed": metrics.num_resumed,
        }
