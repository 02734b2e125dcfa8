"""What surrounds the answers: health, metrics, properties, models, tokens, request ids, draining."""

import asyncio

from tests.openai.conftest import Adapter
from tests.openai.fake_router import ready_status
from tests.openai.test_bad_input import error_of

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


async def test_health(adapter: Adapter) -> None:
    answer = await adapter.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    adapter.router.answer = ready_status(ready=False, reason="no worker")
    assert "no worker" in error_of(await adapter.http.get("/health"), 503)["message"]
    adapter.router.answer = ready_status(draining=True)
    assert error_of(await adapter.http.get("/health"), 503)["code"] == "draining"
    adapter.router.answer = None  # the router does not answer
    answer = await adapter.http.get("/health")
    assert error_of(answer, 503)["code"] == "router_lost"
    assert answer.headers["retry-after"]


async def test_metrics(adapter: Adapter) -> None:
    answer = await adapter.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text == adapter.router.answer.metrics


async def test_props(adapter: Adapter) -> None:
    props = (await adapter.http.get("/props")).json()
    assert (props["model"], props["max_context"], props["pool_cells"]) == ("smollm2", 2048, 2048)
    assert (props["exact"], props["draining"], props["ready"]) == (True, False, True)
    assert props["workers"][0]["cells"] == {"active": 0, "reusable": 0, "parking": 0, "resuming": 0, "free": 0}
    assert props["limits"]["max_n"] == 128
    assert (props["draft"], props["draft_note"], props["reuse"]) == (2, "", False)
    assert (props["weight_bytes"], props["pool_bytes"], props["state_bytes"]) == (1000, 500, 6 * 70)


async def test_models(adapter: Adapter) -> None:
    listed = (await adapter.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["smollm2"]
    assert (await adapter.http.get("/v1/models/smollm2")).json() == listed["data"][0]


async def test_tokenize_and_back(adapter: Adapter) -> None:
    text = adapter.serving.text
    ids = text.encode("Hello 🙂", add_special=False)
    for body in ({"content": "Hello 🙂"}, {"prompt": "Hello 🙂", "add_special_tokens": False}):
        told = (await adapter.http.post("/tokenize", json=body)).json()
        assert told == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    chat = (await adapter.http.post("/tokenize", json=HELLO)).json()
    assert chat["tokens"] == text.chat_prompt(HELLO["messages"])
    pieces = (await adapter.http.post("/tokenize", json={"content": "Hi 🙂", "with_pieces": True})).json()["tokens"]
    assert b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces).decode() == "Hi 🙂"
    back = (await adapter.http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert back["content"] == back["prompt"]
    assert "<|im_start|>user" in back["content"]
    for body in ({}, {"content": 5}, {"content": "x" * 5_000_000}):
        error_of(await adapter.http.post("/tokenize", json=body))
    for body in ({}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [10**9]}):
        error_of(await adapter.http.post("/detokenize", json=body))


async def test_request_ids(adapter: Adapter) -> None:
    adapter.say("Hello")
    answer = await adapter.http.post(CHAT, json=HELLO)
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    answer = await adapter.http.post(CHAT, json=HELLO, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer = await adapter.http.get("/nothing", headers={"x-request-id": "mine-2"})
    assert answer.headers["x-request-id"] == "mine-2"


async def test_draining_refuses_new_work_and_lets_the_old_finish(adapter: Adapter) -> None:
    adapter.router.accept = asyncio.Event()
    adapter.say("Hello")
    old = asyncio.ensure_future(adapter.http.post(CHAT, json=HELLO))
    await adapter.router.submitted.wait()
    adapter.serving.draining = True
    answer = await adapter.http.post(CHAT, json=HELLO)
    assert error_of(answer, 503)["code"] == "draining"
    assert answer.headers["retry-after"]
    assert error_of(await adapter.http.get("/health"), 503)["code"] == "draining"
    assert not adapter.serving.idle.is_set()
    adapter.router.accept.set()
    assert (await old).json()["choices"][0]["message"]["content"] == "Hello"
    await adapter.serving.idle.wait()


async def test_a_bug_is_a_500_in_the_same_shape(adapter: Adapter) -> None:
    def broken(generate: object) -> None:
        raise ZeroDivisionError

    adapter.router.submit = broken
    assert error_of(await adapter.http.post(CHAT, json=HELLO), 500)["type"] == "server_error"
