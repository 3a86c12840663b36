"""A small HTTP server in a thread that speaks as it is told, to the byte."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chat_events(tokens=3, *, prompt_tokens=10, cached=4, usage=True):
    """A whole chat stream, as data of events."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    texts = [
        {"choices": [{"index": 0, "delta": {"content": f"t{n}\u2028"}, "finish_reason": None}]} for n in range(tokens)
    ]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
    return [role, *texts, end, *([{"choices": [], "usage": counts}] if usage else []), "[DONE]"]


def ids_events(tokens=3, *, prompt_tokens=10, cached=4, irminsul=None):
    """A whole stream of SGLang's /generate; each event repeats the ids before."""
    events = []
    for count in range(1, tokens + 1):
        last = count == tokens
        info = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": cached,
            "finish_reason": {"type": "length"} if last else None,
            **({"irminsul": [irminsul]} if irminsul else {}),
        }
        events.append({"output_ids": list(range(count)), "meta_info": info})
    return [*events, "[DONE]"]


class ScriptedServer:
    """Answers requests for text with what ``answer(body, number)`` yields.

    Each item is an event (an object or text), a pause (a number of seconds), ``("status", code, headers, body)`` as the
    only one, or ``"drop"``, which breaks the connection.
    """

    def __init__(self, answer=None, *, owner="sglang", metrics=None, flush_status=200, key=None, pages=None):
        self.answer = answer or (lambda body, number: chat_events())
        self.owner = owner
        self.metrics = metrics or (lambda: "")
        self.flush_status = flush_status
        self.key = key
        self.pages = pages or {}
        """Bodies of answers to GET that are not the usual ones, by path."""
        self.bodies = []
        self.paths = []
        self.spans = []
        """Start and end of each request for text, in the order they began."""
        self._lock = threading.Lock()

    def __enter__(self):
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                scripted._get(self)

            def do_POST(self):
                scripted._post(self)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *arguments: None
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    @property
    def texts(self):
        """The last messages of the requests for text, in the order they came."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def _get(self, handler):
        self.paths.append(handler.path)
        if self.key and handler.headers.get("authorization") != f"Bearer {self.key}":
            return respond(handler, 401, b"{}")
        if handler.path in self.pages:
            return respond(handler, 200, self.pages[handler.path])
        if handler.path == "/v1/models":
            return respond(handler, 200, json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}).encode())
        if handler.path == "/server_info":
            graphs = {"prefill": {"backend": "breakable", "max_bs": 2048, "bs": [4, 2048]}, "decode": None}
            facts = {"version": "0.5.23", "page_size": 1, "launch_command": "secret", "tp_size": None}
            facts["cuda_graph_config"] = graphs
            return respond(handler, 200, json.dumps(facts).encode())
        if handler.path == "/metrics" and self.metrics():
            return respond(handler, 200, self.metrics().encode())
        return respond(handler, 404, b"{}")

    def _post(self, handler):
        content = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        self.paths.append(handler.path)
        if handler.path.startswith("/flush_cache"):
            return respond(handler, self.flush_status, b"Flush cache failed.\n")
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(json.loads(content))
            self.spans.append([time.perf_counter(), None])
        try:
            self._stream(handler, self.answer(self.bodies[number], number))
        finally:
            self.spans[number][1] = time.perf_counter()
        return None

    def _stream(self, handler, items):
        begun = False
        for item in items:
            if isinstance(item, tuple):
                _, code, headers, body = item
                return respond(handler, code, body, headers)
            if item == "drop":
                handler.close_connection = True
                handler.connection.close()
                return None
            if isinstance(item, (int, float)):
                time.sleep(item)
                continue
            if not begun:
                handler.send_response(200)
                handler.send_header("transfer-encoding", "chunked")
                handler.send_header("content-type", "text/event-stream")
                handler.end_headers()
                begun = True
            # Raw characters, as servers send them.
            data = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
            line = f"data: {data}\n\n".encode()
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")
        return None


def respond(handler, code, body, headers=()):
    handler.send_response(code)
    handler.send_header("content-length", str(len(body)))
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
