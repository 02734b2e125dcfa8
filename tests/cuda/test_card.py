"""device/cuda.py with the real PyCUDA on the fake driver: streams, copies, registrations, graphs, and what goes wrong."""

import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu_worker.device import nvrtc
from gpu_worker.device.cuda import CardError
from tests.cuda.fake import environ
from tests.cuda.fake.torch_on_card import in_host_memory

SCALE, TOTAL_FLOATS = "scale", 20_000
PAGE = 4096


class Scene:
    """A card with the kernels of scale.cu, `values` on it and room for the results."""

    def __init__(self, opened: SimpleNamespace, sources: Path, n: int = 1000) -> None:
        self.card, self.torch, self.n = opened.card, opened.torch, n
        image = nvrtc.compiled("scale.cu", self.card.architecture, sources)
        self.functions = self.card.functions(image, {"scale": 0, "total": 4 * TOTAL_FLOATS})
        self.values = self.torch.upload(torch.arange(n, dtype=torch.float32))
        self.result = self.torch.zeros(4 * n).view(torch.float32)

    def scale(self, by: float, target: torch.Tensor, source: torch.Tensor, stream=None) -> None:
        arguments = struct.pack("PPif", target.data_ptr(), source.data_ptr(), self.n, by)
        self.card.launch(self.functions[SCALE], (-(-self.n // 256), 1, 1), (256, 1, 1), arguments, 0, stream)

    def expected(self, by: float) -> np.ndarray:
        return np.arange(self.n, dtype=np.float32) * np.float32(by)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "scale.cu").write_text(Path(__file__).with_name("scale.cu").read_text())
    (folder / "common.cuh").write_text((nvrtc.SOURCES / "common.cuh").read_text())
    return folder


@pytest.fixture
def scene(card: SimpleNamespace, sources: Path) -> Scene:
    return Scene(card, sources)


lazily = pytest.mark.parametrize("mode", ["lazy"])  # what does not depend on it


def test_a_kernel_runs_in_the_order_of_its_stream(scene: Scene) -> None:
    for by in (2.0, 3.0, 5.0):
        scene.scale(by, scene.result, scene.values)
    assert np.array_equal(scene.torch.download(scene.result).numpy(), scene.expected(5))


def save(scene: Scene, host: np.ndarray, wait: bool) -> bool:
    """Scale, then copy on another stream to the host; whether the copy holds what was computed."""
    scene.scale(2.0, scene.result, scene.values)
    computed = scene.card.record(scene.card.compute)
    if wait:
        scene.card.wait(scene.card.saving, computed)
    scene.card.to_host(host, scene.result.data_ptr(), scene.card.saving)
    copied = scene.card.record(scene.card.saving)
    while not copied.query():
        pass
    return np.array_equal(host.view(np.float32), scene.expected(2))


def times_wrong(trial: Callable[[Scene, np.ndarray, bool], bool], scene: Scene) -> int:
    """How often a trial without its wait ends wrong: in the lazy mode, where it must, and in eight random ones."""
    host, wrong = scene.card.pinned(4 * scene.n), 0
    for mode in ("lazy", *(f"random:{seed}" for seed in range(8))):
        environ.configure(mode)
        in_host_memory(scene.result).zero_()
        right = trial(scene, host, wait=False)
        assert not (right and mode == "lazy")
        wrong += not right
        scene.card.synchronize()
    return wrong


def test_another_stream_waits_for_an_event(scene: Scene) -> None:
    assert save(scene, scene.card.pinned(4 * scene.n), wait=True)


@lazily
def test_a_wait_that_is_missing_shows(scene: Scene) -> None:
    assert times_wrong(save, scene) > 4


def reuse(scene: Scene, host: np.ndarray, wait: bool) -> bool:
    """Upload from one staging area again and again, and use each; whether every upload was what it should have been."""
    target, seen = scene.torch.zeros(4 * scene.n).view(torch.float32), []
    read = None
    for turn in range(6):
        if wait and read is not None:
            read.synchronize()
        host.view(np.float32)[:] = turn
        scene.card.to_card(target.data_ptr(), host, scene.card.loading)
        read = scene.card.record(scene.card.loading)
        scene.card.wait(scene.card.compute, read)
        seen.append(scene.torch.zeros(4 * scene.n).view(torch.float32))
        scene.scale(1.0, seen[-1], target)
        scene.card.wait(scene.card.loading, scene.card.record(scene.card.compute))
    return all(bool((scene.torch.download(kept) == turn).all()) for turn, kept in enumerate(seen))


def test_a_staging_area_is_used_again_when_it_was_read(scene: Scene) -> None:
    assert reuse(scene, scene.card.pinned(4 * scene.n), wait=True)


@lazily
def test_a_staging_area_that_is_written_too_early_shows(scene: Scene) -> None:
    assert times_wrong(reuse, scene) > 2


def test_products_are_enqueued_like_kernels(scene: Scene) -> None:
    x = scene.torch.upload(torch.randn(3, 100).bfloat16())
    weight = scene.torch.upload(torch.randn(50, 100).bfloat16())
    bias = scene.torch.upload(torch.randn(50).bfloat16())
    out = scene.torch.zeros(4 * 3 * 60).view(torch.float32).view(3, 60)[:, :50]
    rounded = scene.torch.zeros(2 * 3 * 50).view(torch.bfloat16).view(3, 50)
    with scene.torch.streaming():
        scene.torch.linear(x, weight, None, out)
        scene.torch.linear(x, weight, bias, rounded)
    exact = in_host_memory(x).double() @ in_host_memory(weight).double().T
    assert torch.allclose(scene.torch.download(out).double(), exact, atol=1e-4)
    assert torch.allclose(scene.torch.download(rounded).double(), exact + in_host_memory(bias).double(), rtol=1e-2, atol=1e-2)


def test_products_sum_in_another_order_at_another_number_of_rows(scene: Scene) -> None:
    x = torch.randn(1, 2000).bfloat16().expand(64, 2000)
    x, weight = scene.torch.upload(x.contiguous()), scene.torch.upload(torch.randn(200, 2000).bfloat16())
    many = scene.torch.zeros(4 * 64 * 200).view(torch.float32).view(64, 200)
    few = scene.torch.zeros(4 * 2 * 200).view(torch.float32).view(2, 200)
    with scene.torch.streaming():
        scene.torch.linear(x, weight, None, many)
        scene.torch.linear(x[:2], weight, None, few)
    many, few = scene.torch.download(many), scene.torch.download(few)
    assert torch.equal(many[0], many[63]) and torch.equal(few[0], few[1])
    assert not torch.equal(many[0], few[0])


@lazily
def test_a_product_of_host_memory_is_refused(scene: Scene) -> None:
    out = scene.torch.zeros(4 * 16).view(torch.float32).view(4, 4)
    with scene.torch.streaming(), pytest.raises(CardError):
        scene.torch.linear(torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16), None, out)


@lazily
def test_torch_may_not_work_on_memory_of_the_card(scene: Scene) -> None:
    for touch in (torch.Tensor.zero_, torch.Tensor.item, torch.Tensor.cpu, lambda t: t + 1, lambda t: t[torch.tensor([1])]):
        with pytest.raises(CardError, match="not ordered"):
            touch(scene.result[:1])


@lazily
def test_kernels_can_be_left_out(scene: Scene) -> None:
    host = scene.card.pinned(4 * scene.n)
    environ.configure(run=False)
    scene.scale(2.0, scene.result, scene.values)
    scene.card.to_host(host, scene.values.data_ptr(), scene.card.compute)
    assert not scene.torch.download(scene.result).any()
    assert np.array_equal(host.view(np.float32), scene.expected(1))


# graphs


def test_a_graph_repeats_what_was_captured_with_what_lies_there_then(scene: Scene) -> None:
    host, back = scene.card.pinned(4 * scene.n), scene.card.pinned(4 * scene.n)
    weight = scene.torch.upload(torch.eye(16).bfloat16())
    x, y = (scene.torch.zeros(2 * 64 * 16).view(torch.bfloat16).view(64, 16) for _ in range(2))
    with scene.card.capture() as graphs, scene.torch.streaming():
        scene.card.to_card(scene.values.data_ptr(), host, scene.card.compute)
        scene.scale(2.0, scene.result, scene.values)
        scene.torch.linear(x, weight, None, y)
        scene.card.to_host(back, scene.result.data_ptr(), scene.card.compute)
    for turn in (3.0, 4.0):
        host.view(np.float32)[:] = turn
        in_host_memory(x).fill_(turn)
        graphs[0].launch()
        scene.card.compute.synchronize()
        assert (back.view(np.float32) == 2 * turn).all() and (in_host_memory(y) == turn).all()
    graphs[0].close()


def test_nothing_runs_while_it_is_captured(scene: Scene) -> None:
    with scene.card.capture() as graphs:
        scene.scale(2.0, scene.result, scene.values)
    assert not scene.torch.download(scene.result).any()
    graphs[0].close()


@lazily
@pytest.mark.parametrize("spoil", ["synchronize", "query", "allocate", "wait"])
def test_what_a_capture_forbids(scene: Scene, card: SimpleNamespace, spoil: str) -> None:
    card.expected[:] = ["capture_errors"]
    before = environ.counters()["capture_errors"]
    outside = scene.card.record(scene.card.saving)

    def capture() -> None:
        with scene.card.capture():
            scene.scale(2.0, scene.result, scene.values)
            match spoil:
                case "synchronize":
                    scene.card.compute.synchronize()
                case "query":
                    outside.query()
                case "allocate":
                    scene.torch.zeros(16)
                case "wait":
                    scene.card.wait(scene.card.compute, outside)

    with pytest.raises((CardError, scene.card.drv.Error)):
        capture()
    assert environ.counters()["capture_errors"] == before + 1
    scene.scale(2.0, scene.result, scene.values)  # and it goes on as before
    assert np.array_equal(scene.torch.download(scene.result).numpy(), scene.expected(2))


# page-locked memory


@pytest.fixture
def shared(card: SimpleNamespace) -> mmap.mmap:
    """Four pages as the host cache hands them out."""
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(file, 4 * PAGE)
    memory = mmap.mmap(file, 4 * PAGE)
    os.close(file)
    return memory


def array(memory: mmap.mmap) -> np.ndarray:
    return np.frombuffer(memory, np.uint8)


def test_copies_of_registered_memory(scene: Scene, shared: mmap.mmap) -> None:
    there = array(shared)
    scene.card.register(there.ctypes.data, len(there))
    assert scene.card.registered_bytes == 4 * PAGE
    scene.card.to_host(there[: 4 * scene.n], scene.values.data_ptr(), scene.card.saving)
    scene.card.saving.synchronize()
    assert np.array_equal(there[: 4 * scene.n].view(np.float32), scene.expected(1))
    scene.card.unregister(there.ctypes.data)
    assert scene.card.registered_bytes == 0


@lazily
def test_pages_are_registered_once(scene: Scene, shared: mmap.mmap) -> None:
    before, start = environ.counters()["registrations"], array(shared).ctypes.data
    scene.card.register(start + PAGE, 2 * PAGE)
    for at, nbytes in ((start, 2 * PAGE), (start + 2 * PAGE, 2 * PAGE), (start, 4 * PAGE), (start + PAGE, PAGE)):
        with pytest.raises(CardError, match="712"):
            scene.card.register(at, nbytes)
    for at, nbytes in ((start + 8, PAGE), (start, 100), (start, 0)):
        with pytest.raises(CardError, match="invalid argument"):
            scene.card.register(at, nbytes)
    scene.card.register(start, PAGE)
    scene.card.register(start + 3 * PAGE, PAGE)
    assert environ.counters()["registrations"] == before + 3
    for at in (start, start + PAGE, start + 3 * PAGE):
        scene.card.unregister(at)
    with pytest.raises(CardError, match="713"):
        scene.card.unregister(start)


@lazily
def test_another_thread_registers(scene: Scene, shared: mmap.mmap) -> None:
    start, failed = array(shared).ctypes.data, []

    def work(prepare: bool) -> None:
        try:
            if prepare:
                scene.card.use_in_this_thread()
            scene.card.register(start, PAGE)
            scene.card.unregister(start)
        except CardError as error:
            failed.append(str(error))

    for prepare in (False, True):
        thread = threading.Thread(target=work, args=(prepare,))
        thread.start()
        thread.join()
    assert len(failed) == 1 and "invalid device context" in failed[0]


# what must never happen is counted


@lazily
def test_a_copy_of_memory_that_is_not_page_locked_is_counted(scene: Scene, card: SimpleNamespace) -> None:
    before, card.expected[:] = environ.counters(), ["unregistered_copies"]
    scene.card.to_host(np.empty(100, np.uint8), scene.values.data_ptr(), scene.card.saving)
    assert environ.counters()["unregistered_copies"] == before["unregistered_copies"] + 1


@lazily
def test_memory_that_is_released_under_a_copy_is_counted(scene: Scene, card: SimpleNamespace, shared: mmap.mmap) -> None:
    before, card.expected[:] = environ.counters(), ["early_releases"]
    there = array(shared)
    scene.card.register(there.ctypes.data, len(there))
    scene.card.to_host(there[:100], scene.values.data_ptr(), scene.card.saving)
    with pytest.raises(CardError):
        scene.card.unregister(there.ctypes.data)
    scene.card.saving.synchronize()
    scene.card.unregister(there.ctypes.data)
    assert environ.counters()["early_releases"] == before["early_releases"] + 1


@lazily
def test_a_write_past_the_end_is_counted(scene: Scene, card: SimpleNamespace) -> None:
    before, card.expected[:] = environ.counters(), ["overruns"]
    small = scene.torch.zeros(4 * scene.n - 4)
    scene.scale(2.0, small, scene.values)
    scene.card.synchronize()
    assert environ.counters()["overruns"] == before["overruns"] + 1


FAILING = """
import struct
from pathlib import Path
from gpu_worker.device import nvrtc
from gpu_worker.device.cuda import Card
card = Card(0)
function = card.functions(nvrtc.compiled("scale.cu", 90, Path({sources!r})), {{"scale": 0}})["scale"]
card.launch(function, (1, 1, 1), (256, 1, 1), struct.pack("PP", 0, 0))
for attempt in range(2):
    try:
        card.compute.synchronize()
    except card.drv.Error as error:
        print("refused:", error)
del function
try:
    card.close()
except card.drv.Error as error:
    print("refused:", error)
"""


def test_a_kernel_that_fails_stops_the_card(fake_driver: None, sources: Path, tmp_path: Path) -> None:
    done = environ.python(FAILING.format(sources=str(sources)), counters=tmp_path)
    assert done.stdout.count("refused:") == 3 and "scale: parameters of 16 bytes" in done.stderr, done.stderr
    assert done.returncode == 0  # not aborted
    (counters,) = environ.counters_of(tmp_path).values()
    assert counters["kernel_errors"] == 1


# kernels and memory


@lazily
def test_a_kernel_with_much_shared_memory(scene: Scene) -> None:
    n = 1000
    arguments = struct.pack("PPi", scene.result.data_ptr(), scene.values.data_ptr(), n)
    scene.card.launch(scene.functions["total"], (1, 1, 1), (1, 1, 1), arguments, 4 * TOTAL_FLOATS)
    assert scene.torch.download(scene.result)[0] == n * (n - 1) / 2
    with pytest.raises(scene.card.drv.Error):
        scene.card.launch(scene.functions["total"], (1, 1, 1), (1, 1, 1), arguments, 4 * TOTAL_FLOATS + 4096)


@lazily
def test_a_kernel_that_the_module_does_not_have(scene: Scene, sources: Path) -> None:
    image = nvrtc.compiled("scale.cu", scene.card.architecture, sources)
    with pytest.raises(scene.card.drv.Error):
        scene.card.functions(image, {"nothing": 0})


@lazily
def test_memory_of_the_card(scene: Scene) -> None:
    free, everything = scene.card.memory()
    held = scene.torch.zeros(1 << 20)
    assert everything == environ.CARD_BYTES and scene.card.memory()[0] == free - (1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        scene.torch.zeros(free)
    del held
    assert scene.card.memory()[0] == free


# opening and closing, in processes of their own


def test_several_cards(fake_driver: None) -> None:
    code = """
from gpu_worker.device.cuda import Card
cards = [Card(0), Card(1)]
held = cards[1].drv.mem_alloc(1 << 20)
print(cards[1].memory()[1] - cards[1].memory()[0], cards[0].name, cards[1].name, cards[1].architecture)
del held
for card in reversed(cards):
    card.close()
"""
    done = environ.python(code, cards=2)
    assert done.returncode == 0 and done.stdout.split() == ["1048576", "fake", "card", "0", "fake", "card", "1", "90"]


def test_it_is_closed_without_a_trace(fake_driver: None, tmp_path: Path) -> None:
    code = """
import os
from gpu_worker.device.cuda import Card
for _ in range(3):
    card = Card(0)
    memory = card.drv.mem_alloc(100)
    host = card.pinned(4096)
    with card.capture() as graphs:
        card.to_host(host[:100], int(memory), card.compute)
    graphs[0].launch()
    event = card.record(card.compute)
    graphs[0].close()
    del memory, host, event
    card.close()
print(os.getpid())
"""
    done = environ.python(code, counters=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    counters = environ.counters_of(tmp_path)[int(done.stdout)]
    assert not environ.complaints(counters) and counters["copies"] == 3


def test_counters_of_a_process_that_was_killed(fake_driver: None, tmp_path: Path) -> None:
    code = """
import os, signal
from gpu_worker.device.cuda import Card
card = Card(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert environ.python(code, counters=tmp_path).returncode == -9
    (counters,) = environ.counters_of(tmp_path).values()
    assert counters["contexts"] == 1 and counters["streams"] == 3


REFUSED = """
from gpu_worker.device.cuda import Card
from wire.config import ConfigError
try:
    Card(1)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("cards", "words"), [(0, "no CUDA-capable device is detected"), (1, "this machine has 1 card(s)")])
def test_a_card_that_is_not_there_is_one_line(fake_driver: None, cards: int, words: str) -> None:
    done = environ.python(REFUSED, cards=cards)
    assert words in done.stdout and "--device cuda:1" in done.stdout and len(done.stdout.splitlines()) == 1 and not done.stderr


def test_pycuda_that_is_not_there_is_one_line(fake_driver: None) -> None:
    done = environ.python("import sys; sys.modules['pycuda'] = None\n" + REFUSED)
    assert "PyCUDA is not installed" in done.stdout and len(done.stdout.splitlines()) == 1 and not done.stderr
