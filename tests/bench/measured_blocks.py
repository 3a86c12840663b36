"""Blocks as bench serve keeps them."""


def block(server="stock", repeat=0, ttft=0.1, pace="1 at once", **more):
    distribution = {"p50": ttft, "p95": 2 * ttft, "p99": 3 * ttft, "mean": ttft}
    made = {
        "format": 1,
        "id": f"{server} {repeat} {pace}",
        "comparison": pace,
        "server": {
            "name": server,
            "url": "http://127.0.0.1:1",
            "kind": "sglang",
            "model": "m",
            "facts": {"version": "0.5.23"} | ({"mode": "live"} if server == "live" else {}),
            "cache_at_start": "flushed",
            "ignore_eos": True,
        },
        "load": {
            "name": "<b>log|",
            "fingerprint": "f",
            "calls": 10,
            "sessions": 2,
            "left_out": 3,
            "notes": ["mind this"],
        },
        "settings": {
            "protocol": "openai",
            "max_tokens": 16,
            "think_time": "0",
            "warm_up": 2,
            "seed": 0,
            "pace": pace,
            "load": "f",
        },
        "repeat": repeat,
        "started": "2026-11-30T10:00:00+00:00",
        "seconds": 2.0,
        "requests": 10,
        "succeeded": 10,
        "errors": {},
        "ttft_s": distribution,
        "itl_s": None,
        "tpot_s": None,
        "end_to_end_s": distribution,
        "requests_per_s": 5.0,
        "in_flight": 1.0,
        "output_tokens_per_s": 80.0,
        "prompt_tokens": {"p50": 1000.0, "p95": 1000.0, "p99": 1000.0, "mean": 1000.0},
        "tokens": {"prompt": 10_000, "completion": 160, "prefix": 2_500, "computed": 7_500},
        "client": {"irminsul": "0.1.0", "python": "3.11", "processor": "Abacus", "cores": 2, "gpus": ["H200, 1"]},
        "client_cpu_share": 0.1,
        "command": "irminsul bench serve",
    }
    return made | more
