"""Who is parked when the pool fills, and what happens before anybody is. Pool: 20 blocks of 4 cells, HIGH 18, LOW 12."""

from gpu_worker.policy import preemption
from gpu_worker.policy.events import Emit, Finish, Load, Notify, ReleaseLease, Reserve, Save
from tests.policy.story import Story


def crowded(**limits) -> Story:
    """a, b and c fit below LOW together, and grow."""
    story = Story(**limits)
    for name, prompt in (("a", 20), ("b", 9), ("c", 7)):
        story.submit(name, prompt)
    return story


def test_below_the_watermark_nothing_happens_but_tokens_and_growth():
    story = crowded()
    story.step()
    claimed = story.used
    assert claimed == 6 + 3 + 2, "each has claimed its prompt and one cell more"
    while story.used <= 15:
        story.step()
    assert {type(action) for action in story.log} == {Emit}
    cells = [len(story[name].tokens) for name in "abc"]
    held = [len(story[name].blocks) for name in "abc"]
    assert all((blocks - 1) * 4 <= count <= blocks * 4 + 1 for count, blocks in zip(cells, held)), "no block but for growth"


def test_the_newest_is_parked_when_the_next_step_would_pass_high():
    story = crowded()
    story.until(story.parked)
    assert story.parked() == ["c"]
    assert story.scheduler.book.pool.used <= 18
    assert story.states("a", "b") == ["running", "running"]


def test_high_is_never_passed_while_somebody_can_be_parked():
    story = crowded()
    for _ in range(100):
        story.step()
        running = [name for name in "abc" if story.state(name) == "running"]
        leaving = sum(len(story[name].blocks) for name in "abc" if story.state(name) == "parking")
        assert story.used - leaving <= 18 or len(running) <= 1


def test_the_largest_is_never_parked_though_it_is_the_newest():
    story = Story()
    for name, prompt in (("a", 7), ("b", 9), ("c", 20)):
        story.submit(name, prompt)
    story.until(lambda: len(story.parked()) >= 2)
    assert story.parked()[0] == "b"
    assert "c" not in story.parked()


def test_equally_large_the_oldest_is_protected():
    story = Story()
    for name in "abc":
        story.submit(name, 10)
    story.until(lambda: len(story.parked()) >= 2)
    assert "a" not in story.parked()
    assert story.parked()[0] == "c"


def test_a_replayed_request_keeps_its_arrival_and_is_not_the_newest():
    story = Story()
    story.submit("a", 20, arrival=5)
    story.submit("b", 9, arrival=6)
    story.submit("replayed", 7, arrival=1)
    story.until(story.parked)
    assert story.parked() == ["b"]


def test_the_only_sequence_grows_to_the_whole_pool_and_ends_with_length():
    story = Story()
    story.submit("a", 20)
    story.until(lambda: story.state("a") == "gone")
    assert story.ending("a").reason == "length"
    assert story.ending("a").usage.completion_tokens == 60
    assert story.parked() == []


def test_blocks_kept_for_reuse_are_given_up_before_anybody_is_parked():
    story = Story()
    story.submit("old", 40, max_tokens=1)
    story.until(lambda: story.state("old") == "gone")
    assert story.scheduler.book.pool.reusable == 10
    story.submit("a", 30)
    story.submit("b", 7)
    while story.used < 18:
        story.step()
        assert story.parked() == []
    assert story.scheduler.book.pool.reusable < 10


def test_no_more_are_parked_than_needed_while_a_park_is_under_way():
    story = crowded(saves="by hand")
    story.until(lambda: story.state("c") == "parking")
    asked = story.actions(Reserve)
    story.steps(3)
    assert story.states("a", "b", "c") == ["running", "running", "parking"]
    assert story.actions(Reserve) == asked, "the blocks that the park will free are counted"


def test_a_park_under_way_keeps_its_blocks():
    story = crowded(saves="by hand")
    story.until(lambda: story.state("c") == "parking")
    blocks = list(story["c"].blocks)
    assert blocks
    story.steps(2)
    assert story["c"].blocks == blocks
    assert not set(blocks) & set(story["a"].blocks + story["b"].blocks)


def test_drafts_are_given_up_before_anybody_is_parked():
    story = Story(num_blocks=10, high=80, low=70, draft_max=3)  # HIGH is 8 blocks
    story.submit("a", 11)
    story.submit("b", 8)
    story.step()
    assert story.used == 4 + 3
    story["a"].blocks += story.scheduler.book.pool.take(1)  # the pool is at HIGH now
    plan = story.step()
    assert [row.draft for row in plan.rows] == [3, 3], "these fit in the blocks they have"
    plan = story.step()
    assert story.parked() == []
    assert story.row(plan, "b").draft == 2, "10 tokens and 2 drafts fit in its 3 blocks"


def test_the_next_steps_drafts_count_in_the_demand():
    story = Story(draft_max=3)
    story.submit("a", 7)
    story.step()
    assert len(story["a"].blocks) == 3, "admission claims prompt, next token and drafts"
    story.step(tokens={"a": [1, 2, 3, 4]})
    story.step()
    assert len(story["a"].blocks) == 4, "12 tokens and 3 drafts"


def test_parked_three_times_is_passed_over_while_another_exists():
    story = crowded()
    story.step()
    story["c"].pressure_parks = 3
    story.until(story.parked)
    assert story.parked() == ["b"]


def test_parked_three_times_is_a_victim_when_nobody_else_is_left():
    story = Story()
    story.submit("a", 20)
    story.submit("b", 9)
    story.step()
    story["b"].pressure_parks = 3
    story.until(story.parked)
    assert story.parked() == ["b"]


def test_explicit_and_forced_parks_do_not_count_for_being_passed_over():
    story = Story(num_blocks=40)
    for name, prompt in (("a", 40), ("b", 18), ("c", 4)):
        story.submit(name, prompt)
    story.step()
    for _ in range(4):
        story.park("c")
        story.step()
        story.resume("c")
        story.until(lambda: story.state("c") == "running")
    assert story["c"].parks == 4
    story.until(lambda: story.parked("pressure"))
    assert story.parked("pressure") == ["c"]


def test_a_replaying_one_is_passed_over_while_another_exists():
    story = crowded(saves="denied", step_tokens=4)
    story.until(lambda: story.row(story.plans[-1], "c") if story.plans else None)
    story["c"].replaying = True
    assert [seq.request_id for seq in rank(story)] == ["b", "c"]


def rank(story: Story) -> list:
    running = story.scheduler.book.running.values()
    keep = preemption.protected(running, lambda seq: seq.priority)
    others = [seq for seq in running if seq is not keep]
    return preemption.victims(others, lambda seq: seq.priority, story.scheduler.policy, protect_after=3)


def test_one_still_in_its_prompt_may_be_a_victim():
    story = Story(step_tokens=4, low=80)  # LOW 16
    story.submit("a", 20)
    story.submit("b", 9)
    story.until(lambda: story["b"].generated > 0)
    story.submit("late", 19)
    story.until(story.parked)
    assert story.parked() == ["late"]
    assert story["late"].generated == 0
    assert story["late"].high_computed > 0, "it was in the middle of its prompt"
    story.until(lambda: "late" in story.said)
    assert story.said["late"][0] == 7


def test_victims_come_from_the_worst_class_first_and_the_largest_of_the_best_is_protected():
    story = Story()
    story.submit("batch", 20, priority=5)
    story.submit("chat", 9)
    story.submit("other chat", 7)
    story.until(lambda: len(story.parked()) >= 1)
    assert story.parked() == ["batch"], "the largest, but not of the best class"
    story.until(lambda: len(story.parked()) >= 2)
    assert story.parked()[1] == "other chat"


def test_victims_are_counted_by_the_blocks_that_only_they_hold():
    story = Story(low=80)
    shared = list(range(16))
    story.submit("a", [*shared, 1, 2, 3, 4, 5, 6, 7])
    story.until(lambda: "a" in story.said)
    story.submit("b", [*shared, 8])
    story.submit("c", [*shared, 9])
    story.step()
    assert story["c"].blocks[:4] == story["a"].blocks[:4]
    assert story.scheduler.book.leaving().add(story["c"].blocks) == 1, "four of its five blocks are somebody else's too"


def test_parking_a_sharer_leaves_the_others_their_blocks():
    story = Story(low=80)
    shared = list(range(16))
    story.submit("a", [*shared, 1, 2, 3])
    story.until(lambda: "a" in story.said)
    story.submit("b", [*shared, 8])
    story.step()
    story.park("b")
    story.until(lambda: story.state("b") == "parked")
    assert story["a"].blocks[:4] == story.scheduler.book.pool.find(story["a"].digests[:4])
    assert all(story.scheduler.book.pool.refs(block) == 1 for block in story["a"].blocks)


def test_after_sixteen_pressure_parks_it_comes_back_alone_and_nobody_joins_it():
    story = crowded()
    story.step()
    story["c"].pressure_parks = preemption.EXHAUSTED_AFTER - 1
    story["b"].pressure_parks = preemption.EXHAUSTED_AFTER - 1
    story.until(story.parked)
    assert story.parked() == ["c"]
    story.submit("late", 3)
    story.submit("important", 3, priority=-1)
    story.until(lambda: story.state("c") == "running")
    assert story.states("a", "b") == ["gone", "gone"] or "running" not in story.states("a", "b")
    assert story.state("late") == "waiting"
    story.until(lambda: story.state("c") == "gone")
    assert story.ending("c").reason == "length"
    assert story.parked().count("c") == 1


def test_an_exhausted_one_does_not_come_back_beside_another_though_it_would_fit():
    story = Story()
    story.submit("a", 3, max_tokens=20)
    story.submit("b", 3)
    story.step()
    story["b"].pressure_parks = preemption.EXHAUSTED_AFTER
    story.park("b")
    story.until(lambda: story.state("b") == "parked")
    story.resume("b")
    story.submit("late", 3)
    story.steps(5)
    assert story.states("a", "b", "late") == ["running", "parked", "waiting"]
    story.until(lambda: story.state("a") == "gone")
    story.steps(2)
    assert story.states("b", "late") == ["running", "waiting"], "and nobody joins it"


def test_the_worst_case_of_one_pool_and_many_ends_for_everybody():
    story = Story(saves="denied", slots=8)
    names = [f"r{number}" for number in range(12)]
    for name in names:
        story.submit(name, 5, max_tokens=50)
    story.until(lambda: story.scheduler.idle, most=5000)
    for name in names:
        ending = story.ending(name)
        assert (ending.reason, ending.usage.completion_tokens) == ("length", 50)
        assert ending.usage.parks <= preemption.EXHAUSTED_AFTER


def test_off_parks_nobody_and_fails_those_that_need_cells_with_the_numbers():
    story = Story(policy="off")
    for name, prompt in (("a", 20), ("b", 20), ("c", 20)):
        story.submit(name, prompt)
    story.until(lambda: story.scheduler.idle)
    assert not story.actions(Reserve) and not story.actions(Save) and not story.actions(Load) and not story.actions(Notify)
    failed = [a for a in story.actions(Finish) if a.reason == "error"]
    assert failed
    assert {a.code for a in failed} == {"kv_cache_full"}
    assert "of 80 cells" in failed[0].error and "--policy off" in failed[0].error
    assert not story.actions(ReleaseLease)
