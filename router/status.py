"""The answer to GetStatus, made from the ledger and the host cache's word."""

from collections.abc import Callable

from router.fleet import Worker
from router.ledger import Ledger
from wire.messages import Budget, Status, WorkerStatus


def status_of(ledger: Ledger, budget: Budget | None, metrics: str, now: float) -> Callable[[str], Status]:
    """A function from the asker's request id to its Status."""
    ready, reason = readiness(ledger, now)
    workers = sorted(ledger.fleet.workers.values(), key=lambda worker: worker.name)

    def answer(request_id: str) -> Status:
        return Status(
            request_id=request_id,
            ready=ready,
            reason=reason,
            draining=ledger.draining,
            queued=ledger.queued,
            running=ledger.fleet.running,
            parked=ledger.parked,
            slots=ledger.fleet.slots(),
            workers=[_worker_status(worker, now) for worker in workers],
            metrics=metrics,
            budget_bytes=budget.budget_bytes if budget else 0,
            used_bytes=budget.used_bytes if budget else 0,
            held_bytes=budget.held_bytes if budget else 0,
        )

    return answer


def readiness(ledger: Ledger, now: float) -> tuple[bool, str]:
    """Whether a request would be decoded now, and why not."""
    workers = ledger.fleet.workers.values()
    if ledger.draining:
        return False, "draining"
    if not workers:
        return False, "no worker is connected"
    if not any(worker.is_alive(now) and worker.load is not None for worker in workers):
        return False, "no worker answers"
    return True, ""


def _worker_status(worker: Worker, now: float) -> WorkerStatus:
    hello = worker.hello
    return WorkerStatus(
        name=hello.name,
        model=hello.model,
        device=hello.device,
        dtype=hello.dtype,
        alive=worker.is_alive(now),
        pool_cells=hello.pool_cells,
        block_size=hello.block_size,
        slots=hello.slots,
        max_context=hello.max_context,
        exact=hello.exact,
        exact_note=hello.exact_note,
        cells=worker.cells,
        step=worker.load.step if worker.load is not None else 0,
        weight_bytes=hello.weight_bytes,
        pool_bytes=hello.pool_bytes,
        state_bytes=hello.state_bytes,
        state_slots=hello.state_slots,
        draft=hello.draft,
        draft_note=hello.draft_note,
        reuse=hello.reuse,
    )
