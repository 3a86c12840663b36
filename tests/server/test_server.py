"""The server over a real socket, mostly through OpenAI's own client."""

import concurrent.futures
import json
import socket
from http import HTTPStatus

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import ANSWER, running, wait_until

from irminsul.errors import InputError
from irminsul.plan import Mode
from irminsul.server import app as app_module
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]


def chat(live, **fields):
    return live.client.chat.completions.create(model="tiny", **{"messages": HI} | fields)


def completion(live, **fields):
    return live.client.completions.create(model="tiny", **{"prompt": "hi", "max_tokens": 100} | fields)


def post(live, path="/v1/chat/completions", headers=None, **fields):
    return live.http.post(path, json={"model": "tiny", "messages": HI} | fields, headers=headers)


def error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    return body["error"]


# ---------------------------------------------------------------- answers


def test_chat(live, tokenizer):
    answer = chat(live)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    prompt = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert list(live.engine.submitted[0].token_ids) == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer(ANSWER)["input_ids"]) + 1


def test_usage_tells_lossless_from_approximate(shared):
    usage = completion(shared, prompt=list(range(50))).usage
    assert usage.prompt_tokens_details.cached_tokens == 10
    assert usage.model_extra["irminsul"] == {
        "prefix": 10,
        "approximate_prefix": 10,
        "shifted": 10,
        "computed": 20,
        "gaps": 2,
        "planned_shifted": 10,
        "match_ms": 1.5,
    }


def test_a_chat_stream_adds_up(shared):
    chunks = list(chat(shared, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == chat(shared).usage


def test_the_stream_on_the_wire(shared):
    response = post(shared, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_completions_whole_and_streamed(shared):
    answer = completion(shared)
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
    chunks = list(completion(shared, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage == answer.usage


def test_completions_take_token_ids_and_sixteen_tokens_by_default(live):
    live.engine.answer = lambda request: [5]
    answer = live.client.completions.create(model="tiny", prompt=[5, 6, 7])
    assert live.engine.submitted[0].token_ids == (5, 6, 7)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_engines_work_too(live, stream):
    live.engine.step_seconds = 0.002
    if stream:
        chunks = list(chat(live, stop=["is 42", "zzz"], stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = chat(live, stop=["is 42", "zzz"]).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("The answer ", "stop")
    wait_until(lambda: live.engine.stopped == [live.engine.submitted[0].request_id])
    assert live.engine.aborted == []


def test_tools_reach_the_template_and_come_back(live, tokenizer):
    calls = [{"id": "c", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}]
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]},
    ]
    chat(live, messages=messages, tools=TOOLS, tool_choice="auto")
    prompt = tokenizer.decode(live.engine.submitted[0].token_ids)
    assert prompt.startswith(f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>")
    assert '<call>get_time {"zone": "UTC"}</call>' in prompt
    assert "<|im_start|>tool\nnoon<|im_end|>" in prompt


def test_chat_logprobs(shared, tokenizer):
    content = chat(shared, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content) == ANSWER.encode()
    assert all(token.logprob == -0.5 for token in content)
    assert [alternative.logprob for alternative in content[0].top_logprobs] == [-0.5, -1.5]
    streamed = [chunk.choices[0].logprobs.content for chunk in chat(shared, logprobs=True, top_logprobs=2, stream=True)]
    assert [token for tokens in streamed for token in tokens] == content
    assert chat(shared).choices[0].logprobs is None


def test_completion_logprobs(shared):
    logprobs = completion(shared, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5
    assert len(completion(shared, logprobs=0).choices[0].logprobs.top_logprobs[0]) == 1


def test_many_streams_at_once_do_not_mix(live, tokenizer):
    live.engine.answer = lambda request: [*request.token_ids, tokenizer.eos_token_id]

    def echo(number):
        prompt = f"stream {number}: café 🙂"
        chunks = completion(live, prompt=prompt, stream=True)
        return prompt, "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for prompt, text in pool.map(echo, range(48)):
            assert text == prompt


def test_the_longest_output_fits_what_is_left(live):
    live.engine.answer = lambda request: [5]
    prompt = [5] * 1990
    assert completion(live, prompt=prompt, max_tokens=10).usage.completion_tokens == 10
    live.client.completions.create(model="tiny", prompt=prompt)
    assert live.engine.submitted[-1].sampling.max_tokens == 10


# ---------------------------------------------------------------- extensions


def test_tenant_salt_and_mode_reach_the_engine(live):
    headers = {"X-Irminsul-Tenant": "team-7", "X-Irminsul-Mode": "observe"}
    chat(live, extra_headers=headers, extra_body={"cache_salt": "pepper"})
    chat(live, extra_body={"irminsul": "off", "top_k": 5})
    chat(live)
    first, second, third = live.engine.submitted
    assert (first.tenant, first.cache_salt, first.mode) == ("team-7", "pepper", Mode.OBSERVE)
    assert (second.tenant, second.cache_salt, second.mode, second.sampling.top_k) == ("", "", Mode.OFF, 5)
    assert third.mode is None


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, ".hidden", "a/b", "caf\xe9"])
def test_a_tenant_must_be_a_plain_name(shared, tenant):
    response = post(shared, headers={"X-Irminsul-Tenant": tenant.encode("latin-1")})
    assert error(response, 400)["param"] == "X-Irminsul-Tenant"


def test_a_tenant_given_twice_is_refused(shared):
    headers = [("X-Irminsul-Tenant", "a"), ("X-Irminsul-Tenant", "b")]
    assert "more than once" in error(post(shared, headers=headers), 400)["message"]


def test_modes_are_checked(shared):
    wrong = error(post(shared, irminsul="on"), 400)
    assert (wrong["param"], "off, observe, live" in wrong["message"]) == ("irminsul", True)
    assert "header" in error(post(shared, irminsul="off", headers={"X-Irminsul-Mode": "live"}), 400)["message"]
    assert post(shared, irminsul="off", headers={"X-Irminsul-Mode": "off"}).status_code == 200


def test_a_request_cannot_reach_beyond_the_servers_mode(tokenizer):
    engine = FakeEngine(lambda request: [tokenizer.eos_token_id], eos=tokenizer.eos_token_id, mode=Mode.OBSERVE)
    with running(create_app(EngineRunner(engine), tokenizer, model_name="tiny")) as url:
        body = {"model": "tiny", "prompt": "hi"}
        refused = httpx.post(f"{url}/v1/completions", json=body | {"irminsul": "live"})
        assert "mode observe" in error(refused, 400)["message"]
        assert httpx.post(f"{url}/v1/completions", json=body | {"irminsul": "off"}).status_code == 200


# ---------------------------------------------------------------- hang-ups


def hang_up_in_the_middle(live, fields, before_closing):
    """Send a request by hand, call ``before_closing``, and close the connection."""
    body = json.dumps({"model": "tiny", "messages": HI} | fields).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        before_closing(connection)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_before_the_first_token_frees_the_slots(live, stream):
    live.engine.hold()
    hang_up_in_the_middle(live, {"stream": stream}, lambda _: wait_until(lambda: live.engine.submitted))
    wait_until(lambda: live.engine.aborted == [live.engine.submitted[0].request_id])
    live.engine.release()
    assert 'irminsul_requests_total{finish_reason="abort"} 1.0' in live.http.get("/metrics").text
    assert live.engine.stats().free_slots == 10_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_in_the_middle_frees_the_slots(live, stream):
    live.engine.answer = lambda request: [5]
    live.engine.step_seconds = 0.01

    def some_tokens(connection):
        if stream:
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(4096)
        else:
            wait_until(lambda: live.engine.stats().free_slots < 10_000 - len(live.engine.submitted[0].token_ids) - 3)

    hang_up_in_the_middle(
        live, {"stream": stream}, lambda c: (wait_until(lambda: live.engine.submitted), some_tokens(c))
    )
    wait_until(lambda: live.engine.aborted == [live.engine.submitted[0].request_id])
    assert live.engine.stats().free_slots == 10_000
    live.engine.step_seconds = 0
    assert post(live, max_tokens=3).status_code == 200, "and the server goes on"


def test_a_client_that_closes_its_stream_frees_the_slots(live):
    live.engine.answer = lambda request: [5]
    live.engine.step_seconds = 0.01
    with chat(live, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: len(live.engine.aborted) == 1)


# ---------------------------------------------------------------- errors


def test_openai_clients_see_their_own_exceptions(live):
    with pytest.raises(openai.NotFoundError) as missing:
        live.client.chat.completions.create(model="other", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        completion(live, prompt=[5] * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as many:
        chat(live, n=2)
    assert many.value.param == "n"
    live.engine.max_waiting = 0
    with pytest.raises(openai.RateLimitError) as busy:
        chat(live, stream=True)
    assert busy.value.response.headers["retry-after"] == "1"
    assert busy.value.code == "overloaded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"model": None}, "model"),
        ({"tools": [{}]}, "tools[0]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "developer", "content": "be brief"}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(shared, fields, param):
    refused = error(post(shared, **fields), 400)
    assert (refused["param"], refused["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("max_tokens", [0, 3000])
def test_outputs_that_cannot_fit_are_refused(live, max_tokens):
    error(post(live, max_tokens=max_tokens), 400)
    assert live.engine.submitted == []


def test_an_empty_prompt_is_refused(shared):
    with pytest.raises(openai.BadRequestError, match="empty"):
        completion(shared, prompt="")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b"[" * 100_000, b'{"model": "tiny", "messages": "\\ud800"}', b"1" * 5000],
)
def test_bodies_that_are_no_request_are_refused(shared, body):
    response = shared.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error(response, 400)


def test_a_body_of_another_type_is_told_so(shared):
    body = json.dumps({"model": "tiny", "messages": HI}).encode()
    response = shared.http.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert "Content-Type: application/json" in error(response, 400)["message"]


def test_half_a_surrogate_pair_in_a_tool_is_refused(shared):
    tool = {"type": "function", "function": {"name": "\ud800"}}
    body = json.dumps({"model": "tiny", "messages": HI, "tools": [tool]}).encode()
    response = shared.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert "surrogate" in error(response, 400)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v1/models/x", 404)],
)
def test_unknown_routes_and_methods(shared, method, path, status):
    response = shared.http.request(method, path)
    error(response, status)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        assert response.headers["allow"]


def test_long_bodies_are_refused_declared_or_not(engine, tokenizer):
    app = create_app(EngineRunner(engine), tokenizer, model_name="tiny", max_body_bytes=1000)
    body = json.dumps({"model": "tiny", "prompt": "x" * 2000}).encode()
    headers = {"content-type": "application/json"}
    with running(app) as url:
        error(httpx.post(f"{url}/v1/completions", content=body, headers=headers), 413)
        chunked = iter([body[:900], body[900:]])
        error(httpx.post(f"{url}/v1/completions", content=chunked, headers=headers), 413)
        short = {"model": "tiny", "prompt": "x" * 500}
        assert httpx.post(f"{url}/v1/completions", json=short).status_code == 200


def test_large_bodies_together_are_bounded(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(app_module, "MAX_TOTAL_BODY_BYTES", 300_000)
    app = create_app(EngineRunner(engine), tokenizer, model_name="tiny", max_body_bytes=200_000)
    small = json.dumps({"model": "tiny", "prompt": [72], "max_tokens": 1})
    large = small.ljust(150_000)
    headers = {"content-type": "application/json"}
    engine.hold()
    with running(app) as url, concurrent.futures.ThreadPoolExecutor(4) as threads:

        def post_body(body):
            return threads.submit(httpx.post, f"{url}/v1/completions", content=body, headers=headers, timeout=30)

        posted = [post_body(large) for _ in range(3)]
        refused = next(concurrent.futures.as_completed(posted)).result()
        error(refused, 429)
        assert (refused.headers["retry-after"], refused.json()["error"]["code"]) == ("1", "overloaded")
        answered = post_body(small)
        wait_until(lambda: len(engine.submitted) == 3)
        engine.release()
        assert answered.result().status_code == 200
        assert sorted(one.result().status_code for one in posted) == [200, 200, 429]
        assert post_body(large).result().status_code == 200, "there is room again"
        told = httpx.get(f"{url}/metrics").text
    assert 'irminsul_http_answers_total{status="429"} 1.0' in told


def test_the_key_is_asked_for_before_the_body_is_read(engine, tokenizer):
    app = create_app(EngineRunner(engine), tokenizer, model_name="tiny", api_key="s3cret")
    with running(app) as url, httpx.Client(base_url=url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            refused = http.post("/v1/completions", content=b"{", headers=headers)
            assert error(refused, 401)["code"] == "invalid_api_key"
            assert error(http.get("/v1/models", headers=headers), 401)
        assert http.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret") as client:
            assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize(
    "options",
    [{"api_key": ""}, {"api_key": "na\nme"}, {"api_key": " x"}, {"default_max_tokens": 0}, {"max_body_bytes": 0}],
)
def test_options_that_make_no_sense_are_refused(engine, tokenizer, options):
    with pytest.raises(InputError):
        create_app(EngineRunner(engine), tokenizer, model_name="tiny", **options)


def test_a_failure_of_ours_is_500_and_tells_no_details(engine):
    class Broken:
        chat_template = None

        def __len__(self):
            return 1

        def get_vocab(self):
            return {"a": 0}

        def __call__(self, text, **options):
            raise OSError("secret path")

    with running(create_app(EngineRunner(engine), Broken(), model_name="tiny")) as url:
        response = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert "secret" not in error(response, 500)["message"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_the_schema_of_the_api_is_there(shared):
    schema = shared.http.get("/openapi.json").json()
    fields = schema["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "max_tokens", "irminsul", "cache_salt", "tools"} <= set(fields)


def test_an_engine_failure_is_500_and_shows_in_health(live):
    assert live.http.get("/health").json() == {"status": "ok", "model": "tiny", "mode": "live"}
    live.engine.error = RuntimeError("rows are on fire")
    with pytest.raises(openai.InternalServerError, match="rows are on fire"):
        chat(live)
    with pytest.raises(openai.InternalServerError, match="rows are on fire"):
        chat(live, stream=True)
    health = live.http.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "unhealthy", "message": "the engine failed: RuntimeError: rows are on fire"}
    assert live.http.get("/metrics").status_code == 200


def test_an_engine_failure_in_mid_stream_reaches_the_client(live):
    live.engine.answer = lambda request: [5]
    live.engine.step_seconds = 0.01
    stream = iter(chat(live, stream=True))
    next(stream)
    live.engine.error = RuntimeError("rows are on fire")
    with pytest.raises(openai.APIError, match="rows are on fire"):
        list(stream)


def test_prompts_are_never_logged(live, caplog, capfd):
    caplog.set_level("DEBUG", logger="irminsul")
    chat(live, messages=[{"role": "user", "content": "xyzzy"}])
    post(live, messages=[{"role": "user", "content": "xyzzy"}], temperature="xyzzy")
    live.engine.error = RuntimeError("boom")
    post(live, messages=[{"role": "user", "content": "xyzzy"}])
    output = capfd.readouterr()
    assert "boom" in caplog.text
    assert "xyzzy" not in caplog.text + output.out + output.err


# ---------------------------------------------------------------- models and metrics


def test_models(shared):
    (card,) = shared.client.models.list().data
    assert (card.id, card.object, card.owned_by, card.model_extra["max_model_len"]) == (
        "tiny",
        "model",
        "irminsul",
        2000,
    )
    assert shared.client.models.retrieve("tiny") == card


def samples(live):
    families = text_string_to_metric_families(live.http.get("/metrics").text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_metrics_count_what_happened(live, tokenizer):
    n_tokens = len(tokenizer(ANSWER)["input_ids"]) + 1
    completion(live, prompt=[5] * 50)
    completion(live, prompt=[5] * 50, max_tokens=2)
    chat(live, stop="answer", messages=[{"role": "user", "content": "x"}])
    n_chat = len(live.engine.submitted[-1].token_ids)
    found = samples(live)
    part = n_chat // 5
    for source, of_chat in (
        ("prefix", part),
        ("approximate_prefix", part),
        ("shifted", part),
        ("computed", n_chat - 3 * part),
    ):
        assert found["irminsul_prompt_tokens_total", source] == of_chat + (40 if source == "computed" else 20)
    assert found["irminsul_gaps_total",] == 6
    assert found["irminsul_plans_total", "reused"] == 3
    assert found["irminsul_planned_shifted_tokens_total",] == 20 + part
    assert found["irminsul_requests_total", "stop"] == 2
    assert found["irminsul_requests_total", "length"] == 1
    assert found["irminsul_requests_total", "error"] == found["irminsul_requests_total", "abort"] == 0
    for histogram in ("match_seconds", "queue_seconds", "time_to_first_token_seconds"):
        assert found[f"irminsul_{histogram}_count",] == 3
    assert found["irminsul_match_seconds_sum",] == pytest.approx(0.0045)
    generated = found["irminsul_generated_tokens_total",]
    assert found["irminsul_inter_token_latency_seconds_count",] == generated - 3
    assert generated >= n_tokens + 2 + 2


def test_metrics_show_the_engine_as_it_is(live):
    live.engine.hold()
    live.engine.answer = lambda request: [5]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(completion, live, prompt=[5] * 50, max_tokens=3)
        wait_until(lambda: samples(live)["irminsul_requests_running",] == 1)
        assert samples(live)["irminsul_pool_slots", "active"] == 50
        live.engine.release()
        waiting.result()
    wait_until(lambda: samples(live)["irminsul_requests_running",] == 0)
    found = samples(live)
    assert (found["irminsul_pool_slots", "cached"], found["irminsul_pool_slots", "active"]) == (53, 0)
    assert sum(found["irminsul_pool_slots", state] for state in ("free", "cached", "active")) == 10_000
    assert found["irminsul_pool_locked_slots",] == 3
    assert (found["irminsul_registry_entries",], found["irminsul_evicted_slots_total",]) == (7, 5)
    assert found["irminsul_requests_waiting",] == 0


def test_two_servers_in_a_process_count_apart(live, engine, tokenizer):
    other = FakeEngine(engine.answer, eos=tokenizer.eos_token_id)
    with running(create_app(EngineRunner(other), tokenizer, model_name="tiny")) as url:
        httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert samples(live)["irminsul_generated_tokens_total",] == 0
