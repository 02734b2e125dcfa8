"""The cost model: its table, the closed form of many steps, its bytes, and files that are wrong."""

from pathlib import Path

import msgspec
import pytest

from gpu_worker.policy.events import Row
from sim.costs import CostModel, CostsError, Work, attended, encode, load_costs, shipped, work_of
from wire.messages import Sampling

COSTS = CostModel(
    name="test", where="nowhere", rows_s=((1, 1.0), (3, 2.0), (13, 12.0)), cell_bytes=100, sequence_s=0.25,
    decode_cell_s=0.01, prefill_cell_s=0.002, save_bytes_per_s=1000.0, load_bytes_per_s=500.0, state_bytes=5000, block_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 3.0), (13, 12.0), (23, 22.0)]
)  # the last slope goes on
def test_the_table_is_linear_between_its_entries(rows: int, seconds: float) -> None:
    assert COSTS.table_s(rows) == pytest.approx(seconds)


def test_a_table_of_one_entry_is_a_constant() -> None:
    one = msgspec.structs.replace(COSTS, rows_s=((4, 2.0),))
    assert [one.table_s(rows) for rows in (1, 4, 9)] == [2.0, 2.0, 2.0]


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert COSTS.step_s(2, 1, 100, 50) == pytest.approx(2.0 + 2 * 0.25 + 100 * 0.01 + 50 * 0.002)


@pytest.mark.parametrize("decodes", [1, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 17])
def test_many_steps_are_their_sum(steps: int, decodes: int) -> None:
    one_by_one = sum(COSTS.step_s(decodes, 0, 500 + decodes * step, 0) for step in range(steps))
    assert COSTS.steps_s(steps, decodes, 500) == pytest.approx(one_by_one, rel=1e-12)


def test_work_tells_decodes_from_chunks() -> None:
    rows = [row(start=9, count=1, known=10), row(start=4, count=3, known=7), row(start=0, count=1, known=5)]
    assert work_of(rows) == Work(decodes=1, prefill_tokens=4, decode_cells=10, prefill_cells=5 + 6 + 7 + 1)


def test_what_a_chunk_reads() -> None:
    assert attended(0, 4) == 1 + 2 + 3 + 4
    assert attended(10, 2) == 11 + 12


def test_a_lease_is_whole_pages_and_holds_the_state() -> None:
    assert COSTS.block_bytes == 1600
    assert COSTS.unit_bytes == 4096
    assert COSTS.lease_bytes(3) == (3 + 2) * 4096
    assert COSTS.image_bytes(3) == 3 * 1600 + 5000


def test_copies_take_time_unless_parks_are_free() -> None:
    free = COSTS.with_free_parks()
    assert (COSTS.save_s(3000), COSTS.load_s(3000)) == (3.0, 6.0)
    assert (free.save_s(3000), free.load_s(3000)) == (0.0, 0.0)
    assert free.step_s(2, 1, 100, 50) == COSTS.step_s(2, 1, 100, 50)
    assert free.lease_bytes(3) == COSTS.lease_bytes(3)


def test_a_file_holds_the_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(encode(COSTS))
    assert load_costs(str(path)) == COSTS


def test_shipped_models_load() -> None:
    assert {"cpu", "card"} <= set(shipped())
    for name in shipped():
        costs = load_costs(name)
        assert costs.name == name
        assert costs.step_s(4, 0, 4000, 0) < costs.step_s(4, 252, 4000, 252 * 500)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "truncated"),
        ('{"name": "x"}', "where"),
        ('{"name":"x","where":"","cell_bytes":1,"rows_s":[]}', "rows_s"),
        ('{"name":"x","where":"","cell_bytes":1,"rows_s":[[2,1.0],[1,1.0]]}', "rows_s"),
        ('{"name":"x","where":"","cell_bytes":1,"rows_s":[[1,-1.0]]}', "negative"),
        ('{"name":"x","where":"","cell_bytes":1,"rows_s":[[1,0.0]],"sequence_s":1}', "at least 1e-06 s"),
        ('{"name":"x","where":"","cell_bytes":0,"rows_s":[[1,1.0]]}', "cell_bytes"),
        ('{"name":"x","where":"","cell_bytes":1,"rows_s":[[1,1.0]],"speed":1}', "speed"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(CostsError, match=says) as error:
        load_costs(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_names_the_shipped_ones() -> None:
    with pytest.raises(CostsError, match="card, cpu"):
        load_costs("gpu")


def row(start: int, count: int, known: int) -> Row:
    return Row("a", [1] * known, start, count, [0], start + count == known, Sampling(seed=1), known)
