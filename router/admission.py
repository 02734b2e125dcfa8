"""Whether a request is accepted: sense, size, and the bounds of its key and of the queue. PURE."""

from collections.abc import Container

from router.fleet import Fleet
from router.keys import Keys
from router.queue import Queue
from wire.messages import Generate, Rejected

MAX_QUEUED_TOKENS = 1 << 24  # of all prompts that wait


def unwanted(generate: Generate, living: Container[str], draining: bool) -> Rejected | None:
    """Why it is not accepted, whatever it is, or None. `living`: the ids of all requests."""
    if generate.request_id in living:
        return Rejected(generate.request_id, "duplicate_id", "a request with this id is still alive")
    return Rejected(generate.request_id, "draining", "the server is stopping") if draining else None


def refusal(generate: Generate, fleet: Fleet, queue: Queue, max_queued: int, keys: Keys, may_start: bool) -> Rejected | None:
    """Why the request is not accepted, with the numbers, or None. `may_start`: it would not have to wait for others' keys."""
    request_id, prompt_tokens = generate.request_id, len(generate.prompt_token_ids)
    if why := nonsense(generate, fleet.vocab):
        return Rejected(request_id, "bad_request", why)
    if why := too_long(prompt_tokens, fleet.context_limit()):
        numbers = {"prompt_tokens": prompt_tokens, "max_context": fleet.context_limit()}
        return Rejected(request_id, "context_length_exceeded", why, numbers)
    may_start = may_start and keys.has_room(generate)
    if (rejected := keys.refusal(generate, may_start)) is not None:
        return rejected
    if may_start:
        return None
    if queue.fresh >= max_queued:
        numbers = {"queued": queue.fresh, "max_queued": max_queued}
        return Rejected(request_id, "queue_full", f"{queue.fresh} requests are waiting already", numbers)
    if queue.fresh_tokens + prompt_tokens > MAX_QUEUED_TOKENS:
        numbers = {"queued_tokens": queue.fresh_tokens, "max_queued_tokens": MAX_QUEUED_TOKENS}
        return Rejected(request_id, "queue_full", f"{queue.fresh_tokens} prompt tokens are waiting already", numbers)
    return None


def too_long(prompt_tokens: int, max_context: int) -> str:
    """Why no worker could ever run such a prompt, or nothing. `max_context` 0: no worker is known yet."""
    if not max_context or prompt_tokens + 1 <= max_context:
        return ""
    return f"the prompt has {prompt_tokens} tokens and needs room for one more; the context has {max_context}"


def nonsense(generate: Generate, vocab: int) -> str:
    """What is wrong with a request whose types are right, or nothing. `vocab` 0: not known."""
    prompt = generate.prompt_token_ids
    if not prompt:
        return "the prompt is empty"
    if generate.min_tokens > generate.max_tokens:
        return f"min_tokens {generate.min_tokens} is larger than max_tokens {generate.max_tokens}"
    if vocab:
        highest = max(max(prompt), max(generate.sampling.logit_bias, default=0))
        if highest >= vocab:
            return f"token id {highest} is not in the vocabulary of {vocab}"
    return ""
