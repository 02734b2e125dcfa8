"""Book: every sequence by state, who holds which block, lease and seat, and the transitions between states. It decides nothing.

Each transition is one method that leaves the book whole and says in `actions` what the mechanism has to do.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable

from msgspec.structs import replace

from gpu_worker.policy import preemption
from gpu_worker.policy.events import Action, Finish, Load, Notify, ReleaseLease, Reserve, Save
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.park_cost import ParkCost
from gpu_worker.policy.pool import KvPool, Leaving
from gpu_worker.policy.sequence import Sequence, State, chain, pause_s, usage_of
from gpu_worker.policy.waiting import Waiting
from wire.messages import ParkKind


class Book:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = KvPool(limits.num_blocks, limits.block_size)
        self.park_cost = ParkCost(limits)
        self.actions: list[Action] = []
        self.changed = False  # something happened that may let a parked or waiting sequence in

        self.sequences: dict[str, Sequence] = {}
        self.waiting = Waiting()
        self.running: dict[str, Sequence] = {}
        self.parking: dict[str, Sequence] = {}
        self.parked: dict[str, Sequence] = {}
        self.resuming: dict[str, Sequence] = {}
        self._by_state = {
            State.RUNNING: self.running,
            State.PARKING: self.parking,
            State.PARKED: self.parked,
            State.RESUMING: self.resuming,
        }
        self._asks: dict[int, Sequence] = {}
        self._last_ask = 0
        self._free_seats: list[int] = []  # a heap: the smallest number goes first
        self._seats = 0  # numbers ever handed out
        self._priorities: Counter[int] = Counter()
        # the longest free goes first, so that a resume seldom gets the slot it had; None: the model has no recurrent state
        self._free_states = None if limits.state_slots is None else deque(range(limits.state_slots))

        self.preempted: Counter[str] = Counter()  # by ParkKind
        self.denied: Counter[str] = Counter()  # by reason
        self.parks: Counter[str] = Counter()  # by how and why: "save cheaper"
        self.stalled = 0
        self.resumed = 0

    # queries --------------------------------------------------------------------------------------------------------------
    @property
    def top_class(self) -> int:
        """The best class that any live sequence was submitted with."""
        return min(self._priorities, default=0)

    @property
    def on_device(self) -> bool:
        """Somebody holds blocks."""
        return bool(self.running or self.resuming or self.parking)

    @property
    def free_slots(self) -> int:
        """How many more may come in. A parking one has left its slot, but not its state slot: the copy still reads it."""
        free = self.limits.slots - len(self.running) - len(self.resuming)
        return free if self._free_states is None else min(free, len(self._free_states))

    @property
    def slots_to_come(self) -> int:
        """The same, once the copies under way have ended."""
        free = self.limits.slots - len(self.running) - len(self.resuming)
        return free if self._free_states is None else min(free, len(self._free_states) + len(self.parking))

    def cost(self, seq: Sequence, steps: int) -> int:
        """Blocks by which `used` would grow if it came in now and made so many steps: less what is found and in use anyway."""
        in_use = sum(1 for block in self.found(seq) if self.pool.refs(block))
        return self.pool.blocks_for(preemption.entry_cells(seq, self.limits, steps)) - in_use

    def found(self, seq: Sequence) -> list[int]:
        """The blocks that it would take over if it came in now."""
        return self.pool.find(chain(seq, preemption.findable(seq, self.limits), self.limits.block_size))

    def leaving(self, kept: Iterable[int] = ()) -> Leaving:
        """Who leaves already: the parks under way. `kept`: blocks that somebody is about to take over."""
        leaving = Leaving(self.pool, kept)
        for seq in self.parking.values():
            leaving.add(seq.blocks)
        return leaving

    # waiting --------------------------------------------------------------------------------------------------------------
    def add(self, seq: Sequence) -> None:
        """A new sequence; its id is not in use."""
        self.sequences[seq.request_id] = seq
        self._priorities[seq.priority] += 1
        self.enqueue(seq)

    def enqueue(self, seq: Sequence) -> None:
        """Where it waits depends on what it waits for: a release, its sibling's prompt, or only room."""
        leader = self.sequences.get(seq.sibling_of)
        self.changed = True
        if seq.held:
            self.waiting.set_aside(seq)
        elif leader is not None and leader is not seq and not (leader.prompt_done or leader.held):
            self.waiting.set_aside_for(seq, leader.request_id)
        else:
            self.waiting.add(seq)

    def requeue(self, seq: Sequence) -> None:
        """What it waits for has changed."""
        self.waiting.remove(seq)
        self.enqueue(seq)

    def release_followers(self, leader_id: str) -> None:
        """Its siblings need not wait for it any longer."""
        for seq in self.waiting.followers(leader_id):
            self.requeue(seq)

    def admit(self, seq: Sequence, now: float) -> None:
        """From WAITING to RUNNING, with a seat for life and all blocks of its prompt."""
        self._keep_promotion(seq, now)
        self.waiting.remove(seq)
        if self._free_seats:
            seq.seat = heapq.heappop(self._free_seats)
        else:
            seq.seat, self._seats = self._seats, self._seats + 1
        self._take_state(seq)
        seq.computed = self._claim(seq)
        if not seq.generated and not seq.base.cached_tokens:  # otherwise an earlier life has counted them
            seq.cached = seq.computed
        self._move(seq, State.RUNNING)

    def _claim(self, seq: Sequence) -> int:
        """Blocks for all that it claims, as many as possible found. Returns the cells that need not be computed."""
        found = self.found(seq)
        self.pool.share(found)
        fresh = self.pool.blocks_for(preemption.claim_cells(seq, self.limits)) - len(found)
        seq.blocks = found + self.pool.take(fresh)
        seq.published = len(found)
        return len(found) * self.limits.block_size

    def _keep_promotion(self, seq: Sequence, now: float) -> None:
        """What it has gained by waiting stays, or it would be the first victim again."""
        seq.promoted += preemption.promotions_by_waiting(seq, now)

    def _move(self, seq: Sequence, state: State) -> None:
        """Into the book of another state. The order in each is the order of coming in."""
        if (old := self._by_state.get(seq.state)) is not None:
            del old[seq.request_id]
        seq.state = state
        if (new := self._by_state.get(state)) is not None:
            new[seq.request_id] = seq
        self.changed = True

    # blocks ---------------------------------------------------------------------------------------------------------------
    def grow(self, seq: Sequence) -> None:
        """Room for its next step. The caller knows that there is enough."""
        seq.blocks += self.pool.take(preemption.missing(seq, self.pool))

    def publish(self, seq: Sequence) -> None:
        """Make the blocks that have become full findable."""
        full = seq.computed // self.limits.block_size
        if self.limits.reuse and full > seq.published:
            digests = chain(seq, full, self.limits.block_size)
            for index in range(seq.published, full):
                self.pool.publish(seq.blocks[index], digests[index])
            seq.published = full

    def _take_state(self, seq: Sequence) -> None:
        """Room for its recurrent state. What the last owner has left there is not cleared: a row at position 0 starts anew, and
        an image overwrites it whole."""
        if self._free_states is not None:
            seq.state_slot = self._free_states.popleft()

    def _give_back_state(self, seq: Sequence) -> None:
        if seq.state_slot >= 0:
            self._free_states.append(seq.state_slot)
            seq.state_slot = -1

    # parking --------------------------------------------------------------------------------------------------------------
    def park(self, seq: Sequence, kind: ParkKind, now: float) -> None:
        """A running sequence, not in a step, leaves the batch. Its blocks stay its own until its cells are saved, or refused."""
        self.preempted[kind] += 1
        seq.kind = kind
        seq.parks += 1
        seq.pressure_parks += kind == "pressure"
        seq.since = seq.wants_since = now
        seq.draft = 0
        image_blocks = self.pool.blocks_for(seq.computed)
        self.pool.release(seq.blocks[image_blocks:])
        del seq.blocks[image_blocks:]
        self._move(seq, State.PARKING)
        seq.choice = self.park_cost.choose(kind, seq.computed, image_blocks)
        if seq.choice.mode == "save":
            self._last_ask += 1
            seq.ask = self._last_ask
            self._asks[seq.ask] = seq
            seq.image_bytes = self.park_cost.image_bytes(image_blocks)
            self.park_cost.asked(seq.ask, seq.image_bytes)
            self.actions.append(Reserve(seq.ask, seq.request_id, image_blocks))
        else:
            self._leave_device(seq, now)

    def granted(self, ask: int, lease: int, nbytes: int) -> None:
        """Start the copy; a grant, of `nbytes` in the budget, that nobody waits for goes straight back."""
        seq = self._asks.pop(ask, None)
        if seq is None:
            self.actions.append(ReleaseLease(lease))
            self.park_cost.released(nbytes)
            return
        seq.ask = 0
        seq.lease = lease
        seq.copying = True
        self.actions.append(Save(seq.request_id, lease, tuple(seq.blocks), seq.computed, seq.state_slot))

    def refused(self, ask: int, reason: str, now: float) -> None:
        """No lease: its cells are given up and will be recomputed. An answer that nobody waits for is dropped."""
        seq = self._asks.pop(ask, None)
        if seq is not None:
            seq.ask = 0
            self.denied[reason] += 1
            seq.choice = replace(seq.choice, mode="recompute", reason=f"denied_{reason}")
            self._leave_device(seq, now)

    def saved(self, seq: Sequence, ok: bool, now: float) -> None:
        """The copy out has ended."""
        seq.copying = False
        if not ok:
            self._drop_lease(seq)
        if seq.lease is None:
            seq.choice = replace(seq.choice, mode="recompute", reason="copy_failed")
        self._leave_device(seq, now)

    def _leave_device(self, seq: Sequence, now: float) -> None:
        """From PARKING to PARKED: the blocks change hands, the full ones can still be found."""
        self._give_back_blocks(seq)
        self._give_back_state(seq)
        self._move(seq, State.PARKED)
        if seq.lease is None:
            seq.computed = 0
        choice = seq.choice
        self.parks[f"{choice.mode} {choice.reason}"] += 1
        self.actions.append(Notify(seq.request_id, "parked", seq.kind, choice.mode, 0, usage_of(seq, now), choice))

    def _give_back_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.published = 0

    def _drop_lease(self, seq: Sequence) -> None:
        if seq.lease is not None:
            self.actions.append(ReleaseLease(seq.lease))
            self.park_cost.released(seq.image_bytes)
            seq.lease = None

    # resuming -------------------------------------------------------------------------------------------------------------
    def resume(self, seq: Sequence, now: float) -> None:
        """From PARKED to RUNNING, through RESUMING if cells must be copied in. What can be found by hash is not copied."""
        self._keep_promotion(seq, now)
        self._take_state(seq)
        found_cells = self._claim(seq)
        self.park_cost.found(seq.kind, seq.choice.cells, found_cells)
        if seq.lease is not None and found_cells < seq.computed:
            first = seq.published
            seq.copying = True
            self._move(seq, State.RESUMING)
            blocks = tuple(seq.blocks[first : self.pool.blocks_for(seq.computed)])
            self.actions.append(Load(seq.request_id, seq.lease, blocks, first, seq.state_slot))
        else:
            mode = "recompute" if seq.lease is None else "save"
            seq.computed = found_cells
            self._run_again(seq, mode, now)

    def loaded(self, seq: Sequence, ok: bool, now: float) -> None:
        """The copy in has ended and was verified, or the image is worth nothing and what was not found is recomputed."""
        seq.copying = False
        if ok:
            self.publish(seq)
        else:
            seq.computed = seq.published * self.limits.block_size
        self._run_again(seq, "save" if ok else "recompute", now)

    def _run_again(self, seq: Sequence, mode: str, now: float) -> None:
        self._drop_lease(seq)
        pause = pause_s(seq, now)
        self.park_cost.came_back(seq.kind, pause)
        seq.parked_s += pause
        seq.replaying = seq.computed < seq.high_computed
        seq.restarts += seq.replaying and seq.kind != "explicit"
        self.resumed += 1
        self._move(seq, State.RUNNING)
        self.actions.append(Notify(seq.request_id, "resumed", seq.kind, mode, round(pause * 1000), usage_of(seq, now)))

    def leases_lost(self, now: float) -> None:
        """The host cache is gone. Who waits for its answer is denied; a copy under way still ends with its own event."""
        self.park_cost.lost()
        for seq in self.sequences.values():
            seq.lease = None
            if seq.state is State.PARKED:
                seq.computed = 0
        for ask in list(self._asks):
            self.refused(ask, "lost", now)

    # the end --------------------------------------------------------------------------------------------------------------
    def finish(self, seq: Sequence, reason: str, now: float, error: str = "", code: str = "") -> None:
        """From any state in which no copy and no step touches its blocks. Gives back everything it has."""
        assert not seq.copying, "a copy still touches its blocks"
        usage = usage_of(seq, now)
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        self._asks.pop(seq.ask, None)
        self._drop_lease(seq)
        self._give_back_blocks(seq)
        self._give_back_state(seq)
        if seq.seat >= 0:
            heapq.heappush(self._free_seats, seq.seat)
        self._move(seq, State.FINISHED)
        del self.sequences[seq.request_id]
        self._priorities[seq.priority] -= 1
        if not self._priorities[seq.priority]:
            del self._priorities[seq.priority]
        self.actions.append(Finish(seq.request_id, reason, usage, error, code))
        self.release_followers(seq.request_id)

    def end_stalled(self, seq: Sequence, now: float) -> None:
        """Its recompute makes no progress; see `preemption.stalled`."""
        self.stalled += 1
        error = (
            f"its {len(seq.tokens)} tokens were computed again {seq.restarts} times without a new one; "
            "raise --ctx or lower --slots, and see the worker's log"
        )
        self.finish(seq, "error", now, error, "recompute_stalled")
