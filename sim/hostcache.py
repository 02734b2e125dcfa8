"""The fake host cache: a strict budget in bytes, images that lie in leases, and copies that move half now and half later."""

from msgspec import Struct

from gpu_worker.policy.events import Load, Reserve, Save
from sim.device import Device
from sim.state import FakeState

BLOCK_BYTES = 4096
STATE_BYTES = 2 * BLOCK_BYTES


class Image(Struct):
    """What one lease holds. `cells` is None where nothing was written yet."""

    request_id: str
    num_blocks: int
    nbytes: int
    cells: list[int | None]
    hidden: list[int | None]
    state: FakeState | None = None  # None: the model has none, or nothing was saved yet
    position: int = -1  # cells in the image, once committed


class HostCache:
    def __init__(self, budget_bytes: int, block_size: int, recurrent: bool = False) -> None:
        self.budget_bytes = budget_bytes
        self.recurrent = recurrent
        self.block_size = block_size
        self.used_bytes = 0
        self.leases: dict[int, Image] = {}
        self._void: set[int] = set()  # lost in a crash while their release was on its way
        self._last_lease = 0

    def reserve(self, ask: Reserve) -> int | None:
        """A lease, or None when the budget does not allow it."""
        nbytes = ask.num_blocks * BLOCK_BYTES + self.recurrent * STATE_BYTES
        if self.used_bytes + nbytes > self.budget_bytes:
            return None
        self.used_bytes += nbytes
        self._last_lease += 1
        cells: list[int | None] = [None] * (ask.num_blocks * self.block_size)
        self.leases[self._last_lease] = Image(ask.request_id, ask.num_blocks, nbytes, cells, [None] * ask.num_blocks)
        return self._last_lease

    def release(self, lease: int) -> None:
        if lease in self._void:
            self._void.remove(lease)
            return
        assert lease in self.leases, f"lease {lease} was released twice or never granted"
        self.used_bytes -= self.leases.pop(lease).nbytes

    def crash(self, on_their_way: set[int]) -> None:
        """Every lease is void. Only releases that were on their way may still name one."""
        self._void = on_their_way & self.leases.keys()
        self.leases.clear()
        self.used_bytes = 0

    # copies ---------------------------------------------------------------------------------------------------------------
    def save_half(self, save: Save, device: Device, first: bool) -> bool:
        """Copy the first or the second half of the cells and of the state out of the device; commit with the second. False: the
        lease is void."""
        image = self.leases.get(save.lease)
        if image is None:
            return False
        assert image.request_id == save.request_id, f"{save.request_id} saves into a lease of {image.request_id}"
        assert len(save.blocks) == image.num_blocks, f"{save.request_id} saves {len(save.blocks)} blocks into {image.num_blocks}"
        cells = device.read(save.blocks, save.position)
        middle = save.position // 2
        if first:
            image.cells[:middle] = cells[:middle]
        else:
            image.cells[middle : save.position] = cells[middle:]
            image.hidden = [device.hidden[block] for block in save.blocks]
            image.position = save.position
        if device.states is not None and save.state_slot >= 0:
            if image.state is None:
                image.state = device.blank_state()
            image.state.copy_half(device.states[save.state_slot], first)
        return True

    def load_half(self, load: Load, device: Device, first: bool) -> bool:
        """Copy the first or the second half of the wanted blocks and of the state into the device. False: no such image, or not
        this owner's."""
        image = self.leases.get(load.lease)
        if image is None or image.request_id != load.request_id or image.position < 0:
            return False
        size = self.block_size
        middle = len(load.blocks) // 2
        wanted = range(middle) if first else range(middle, len(load.blocks))
        if image.state is not None and load.state_slot >= 0:
            device.states[load.state_slot].copy_half(image.state, first)
        for index in wanted:
            if image.hidden[load.first + index] is not None:
                device.hidden[load.blocks[index]] = image.hidden[load.first + index]
            source = (load.first + index) * size
            for offset in range(size):
                cell = image.cells[source + offset] if source + offset < image.position else None
                if cell is not None:
                    device.cells[load.blocks[index] * size + offset] = cell
        return True
