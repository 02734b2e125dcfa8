"""The fake router's ledger: what each stream has delivered, and whether that is what it should have."""

from msgspec import Struct

from gpu_worker.policy.events import Emit, Finish, Notify
from gpu_worker.policy.limits import Limits
from sim.device import Reference
from wire.messages import Generate, Logprob, Submit, Usage


class Stream(Struct):
    """One request as its client sees it."""

    generate: Generate
    arrival: int
    delivered: list[int] = []
    prompt_logprobs: list[Logprob] = []
    usage: Usage = Usage()
    away: bool = False  # parked, as far as it has been told
    parks_told: int = 0
    cancel_asked: bool = False
    replayed: bool = False
    finish: Finish | None = None

    def submit(self) -> Submit:
        return Submit(self.generate, self.arrival, list(self.delivered), self.usage)

    def emit(self, action: Emit) -> None:
        assert self.finish is None, f"{action.request_id} says something after its last word"
        assert not self.away, f"{action.request_id} emits while it is parked"
        assert action.offset == len(self.delivered), f"{action.request_id}: {action.offset=}, not {len(self.delivered)}"
        self.delivered += action.tokens
        if action.prompt_logprobs:
            have = len(self.prompt_logprobs)
            first = action.prompt_offset - 1
            assert first == have or (self.replayed and first < have), f"{action.request_id} repeats or skips prompt logprobs"
            self.prompt_logprobs[first:] = action.prompt_logprobs + self.prompt_logprobs[first + len(action.prompt_logprobs) :]

    def notify(self, action: Notify) -> None:
        assert self.away == (action.event == "resumed"), f"{action.request_id} is {action.event} twice"
        self.away = action.event == "parked"
        self.parks_told += self.away
        self.usage = action.usage

    def check(self, limits: Limits, pool_is_full_an_error: bool) -> None:
        """At the end: the text is the reference's, whole unless it was cancelled or failed by `off`."""
        finish, generate = self.finish, self.generate
        prompt_len = len(generate.prompt_token_ids)
        name = generate.request_id
        assert finish is not None, f"{name} never ended"
        if finish.code == "context_length_exceeded":
            assert prompt_len + 1 > limits.sequence_cells, f"{name} was refused though it fits"
            return
        assert prompt_len + 1 <= limits.sequence_cells, f"{name} ran though it cannot fit"
        ends = frozenset(generate.stop_token_ids) | (frozenset() if generate.ignore_eos else frozenset(limits.eos_token_ids))
        limit = min(generate.max_tokens, limits.sequence_cells - prompt_len)
        reference = Reference(generate.prompt_token_ids, limit, ends, generate.min_tokens, limits.state_slots is not None)
        usage = finish.usage
        assert usage.prompt_tokens == prompt_len and usage.completion_tokens == len(self.delivered), f"{name}: {usage}"
        assert usage.cached_tokens < prompt_len, f"{name} found its whole prompt: {usage}"
        assert usage.parks >= self.parks_told, f"{name} was told of more parks than counted"
        if finish.reason in ("cancelled", "error"):
            assert self.cancel_asked or (pool_is_full_an_error and finish.code == "kv_cache_full"), f"{name} ended with {finish}"
            assert self.delivered == reference.output[: len(self.delivered)], f"{name}: the text is not the reference's"
            return
        assert self.delivered == reference.output, f"{name}: the text is not the reference's"
        assert finish.reason == reference.reason, f"{name} ended with {finish.reason}, not {reference.reason}"
        assert self.replayed or usage.parks == self.parks_told, f"{name}: {usage.parks} parks counted, {self.parks_told} told"
        if generate.prompt_logprobs is not None:
            assert self.prompt_logprobs == reference.prompt_logprobs, f"{name}: prompt logprobs differ"
            assert usage.cached_tokens == 0, f"{name} took a hit that has no logprobs"
