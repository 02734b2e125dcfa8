"""The real openai client against the real server and the real model: every promise of the HTTP surface that needs both."""

import signal

import openai
import pytest

from tests.system.stack import Stack, prompt, stream, together

CTX = 1024
KEY = "sk-parkade-test"
QUESTION = [{"role": "user", "content": "Name three rivers of Europe and say in one sentence where each of them ends."}]
GREEDY = {"model": "smollm2", "temperature": 0}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("http") / "run", ctx=CTX, slots=4) as stack:
        yield stack


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """A server that wants a key and never finds computed blocks again."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(f"# the only one\n{KEY}\n")
    with Stack(folder / "run", ctx=CTX, slots=4, no_reuse=True, api_key_file=folder / "keys") as stack:
        yield stack


def client_of(stack: Stack, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(stack):
    with client_of(stack) as client:
        yield client


def tokens_of(stack: Stack, text: str) -> list[int]:
    return stack.http.post("/tokenize", json={"content": text}).raise_for_status().json()["tokens"]


def text_of(stack: Stack, ids: list[int]) -> str:
    return stack.http.post("/detokenize", json={"tokens": ids}).raise_for_status().json()["content"]


def test_a_chat_streams_what_it_answers_at_once(client):
    asked = {**GREEDY, "messages": QUESTION, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and len(choice.message.content) > 20
    shown = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert shown[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in shown) == choice.message.content
    assert sum((one.token_ids or [] for one in shown if "token_ids" in one.model_extra), []) == choice.token_ids
    assert [one.finish_reason for one in shown if one.finish_reason] == [choice.finish_reason]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1 and not chunks[-1].choices
    assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (whole.usage.prompt_tokens, len(choice.token_ids))
    assert usages[0].total_tokens == usages[0].prompt_tokens + usages[0].completion_tokens
    for accounted in (whole, chunks[-1]):
        assert accounted.parkade == {"parks": 0, "parked_ms": 0, "recomputed_tokens": 0, "exact": True}
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id != whole.id


def test_a_completion_streams_what_it_answers_at_once(client, stack):
    asked = {**GREEDY, "prompt": "The sea is", "max_tokens": 30, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    shown = [chunk.choices[0] for chunk in chunks]
    choice = whole.choices[0]
    assert "".join(one.text for one in shown) == choice.text == text_of(stack, choice.token_ids)
    assert sum((one.token_ids or [] for one in shown), []) == choice.token_ids
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 30)
    assert choice.prompt_token_ids == tokens_of(stack, "The sea is")
    assert chunks[-1].parkade["exact"] is True  # without a usage chunk the last one carries it
    again = client.completions.create(**{**asked, "prompt": choice.prompt_token_ids})
    assert again.choices[0].token_ids == choice.token_ids


def test_n_answers_have_seeds_of_their_own_and_the_prompt_counts_once(client, stack):
    ids = tokens_of(stack, prompt(1, 60))
    asked = {"model": "smollm2", "prompt": ids, "max_tokens": 16, "n": 3, "seed": 5, "extra_body": {"ignore_eos": True}}
    reply = client.completions.create(**asked)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 48)
    assert [choice.text for choice in client.completions.create(**asked).choices] == texts
    assert client.completions.create(**{**asked, "n": 1}).choices[0].text == texts[0]
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_n_answers_that_do_not_fit_together_all_finish(client):
    asked = {"model": "smollm2", "prompt": prompt(2), "max_tokens": 270, "n": 4, "seed": 9, "extra_body": {"ignore_eos": True}}
    reply = client.completions.create(**asked)
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 4
    assert reply.usage.completion_tokens == 4 * 270
    assert reply.parkade["parks"] > 0, "the pool was never short: the test shows nothing"
    assert len({choice.text for choice in reply.choices}) == 4


def test_a_seed_repeats_and_another_differs(client):
    def say(seed: int) -> str:
        return client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=24, seed=seed).choices[0].text

    assert say(1) == say(1) != say(2)


def test_logprobs_of_a_chat(client):
    reply = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=12, logprobs=True, top_logprobs=3)
    choice = reply.choices[0]
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)  # it was greedy
        assert 0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob


def test_an_echo_gives_the_prompt_the_log_probabilities_that_its_tokens_had_as_answers(client, stack):
    body = {"return_token_ids": True, "ignore_eos": True}
    first = client.completions.create(**GREEDY, prompt="The tides rise and", max_tokens=20, logprobs=2, extra_body=body)
    choice = first.choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    scored = client.completions.create(**GREEDY, prompt=ids, max_tokens=3, echo=True, logprobs=2).choices[0]
    assert scored.text.startswith("The tides rise and" + choice.text)
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.tokens) == len(ids) + 3
    assert "".join(scored.logprobs.tokens) == scored.text
    start = len(choice.prompt_token_ids)
    assert scored.logprobs.token_logprobs[start : len(ids)] == choice.logprobs.token_logprobs
    assert scored.logprobs.top_logprobs[start : len(ids)] == choice.logprobs.top_logprobs


def test_a_stop_string_ends_the_answer_before_it(client):
    asked = {**GREEDY, "prompt": "One, two, three, four,", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]  # across the border of tokens, somewhere
    expected = text[: text.index(stop)]
    whole = client.completions.create(**asked, stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    assert whole.usage.completion_tokens < 40
    chunks = list(client.completions.create(**asked, stop=[stop, "never said"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_logit_bias_forces_and_forbids_a_token(client, stack):
    (sea,) = tokens_of(stack, " sea")
    asked = {**GREEDY, "prompt": "The story of", "max_tokens": 5}
    assert client.completions.create(**asked, logit_bias={str(sea): 100}).choices[0].text == " sea" * 5
    usual = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0].token_ids
    other = client.completions.create(**asked, logit_bias={str(usual[0]): -100}, extra_body={"return_token_ids": True})
    assert usual[0] not in other.choices[0].token_ids


@pytest.mark.parametrize("character", ["🙂", "語"])
def test_a_character_of_several_tokens_is_never_split(stack, character):
    pieces = tokens_of(stack, character)
    assert len(pieces) > 1, "one token: the test shows nothing"
    bias = {str(token): 100 for token in pieces}
    chunks = []
    body = {"prompt": character * 12, "max_tokens": 40, "temperature": 0, "logit_bias": bias}
    answer = together(stream(stack.url, on_tokens=lambda answer: chunks.append(answer.text), **body))[0]
    assert set(answer.ids) <= set(pieces)
    assert answer.text == text_of(stack, answer.ids)
    assert answer.text.count(character) > 3
    assert len(set(chunks)) > 3


def test_more_tokens_than_the_context_end_with_length(client):
    ids = [1000 + i for i in range(CTX - 24)]
    reply = client.completions.create(**GREEDY, prompt=ids, max_tokens=10**12, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == CTX


def test_the_next_turn_finds_the_last_one_and_says_the_same_as_a_server_that_computes_it_anew(client, locked):
    def converse(client: openai.OpenAI) -> tuple[list[str], list[int]]:
        messages, said, cached = list(QUESTION), [], []
        for follow in ("And which of them is the longest?", "Thank you."):
            reply = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=48)
            said.append(reply.choices[0].message.content)
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
            assert cached[-1] < reply.usage.prompt_tokens
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": follow}]
        return said, cached

    said, cached = converse(client)
    assert cached[1] > 0
    with client_of(locked, KEY) as other:
        assert converse(other) == (said, [0, 0])


def test_a_key_is_wanted_where_there_is_a_file_of_them(locked):
    for key in ("wrong", KEY + "x", KEY[:-1]):
        with client_of(locked, key) as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=1)
    for path in ("/v1/models", "/slots", "/metrics", "/props"):
        assert locked.http.get(path).status_code == 401, path
    assert locked.http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["type"] == "authentication_error"
    with client_of(locked, KEY) as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        assert client.completions.create(model="smollm2", prompt="x", max_tokens=2).usage.completion_tokens == 2
    assert locked.http.get("/slots", headers={"authorization": f"Bearer {KEY}"}).status_code == 403  # an admin's


def test_keys_are_read_again_while_a_stream_goes_on(locked):
    """`parkade serve` passes a SIGHUP on; the stream of a key that is gone is told to its end."""
    keys = locked.run_dir.with_name("keys")
    with client_of(locked, KEY) as client, client_of(locked, "another") as other:
        stream = client.completions.create(model="smollm2", prompt="x", max_tokens=60, stream=True)
        next(iter(stream))
        keys.write_text("another\n")
        locked.process.send_signal(signal.SIGHUP)
        while True:  # until it is so
            try:
                client.models.list()
            except openai.AuthenticationError:
                break
        assert [model.id for model in other.models.list()] == ["smollm2"]
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        keys.write_text(f"{KEY}\n")
        locked.process.send_signal(signal.SIGHUP)
        while True:
            try:
                other.models.list()
            except openai.AuthenticationError:
                break


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert "smollm2" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    "text", ["Hello, world", "  two  spaces\n\n\ttab", "🙂 語 é ß", "<|im_start|>user\nhi<|im_end|>", "\x00\x7f\ufffd"]
)
def test_tokenize_and_detokenize_undo_each_other(stack, text):
    ids = tokens_of(stack, text)
    assert ids and text_of(stack, ids) == text
    reply = stack.http.post("/tokenize", json={"prompt": text}).json()
    assert (reply["tokens"], reply["count"]) == (ids, len(ids))
