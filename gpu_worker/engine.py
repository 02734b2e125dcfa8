"""What a worker computes with, whichever device it is: made before the socket opens, closed when the loop has ended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.image import ImageCopies
from gpu_worker.policy.events import Plan, StepDone
from wire.model_spec import ModelSpec


class StepRunner(Protocol):
    """Runs the rows of a plan as one step."""

    def step(self, plan: Plan) -> StepDone: ...


@dataclass
class Engine:
    """A model, its pool and what runs its steps."""

    device: str  # as it is announced
    spec: ModelSpec
    dtype: str
    weight_bytes: int
    kv: KvCache
    exact: bool
    exact_note: str  # why not
    runner: StepRunner
    copies: Callable[[str], ImageCopies | None] = lambda identity: None  # of the worker's identity; None: the loop copies
    close: Callable[[], None] = lambda: None  # when its last step and its copies are over
