"""A log whose text would like to run, to reach out, and to turn around."""

from word_log import WordLog, prose

from irminsul.trace.records import SpanKind

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}&amp;\u202eevil\u2066\x1b[31m"


def hostile_log() -> WordLog:
    log = WordLog(notes=(f"a note {HOSTILE}",))
    for i in range(6):
        system = f"{HOSTILE} run {i} {prose(1, 80)}"
        log.add(
            (SpanKind.SYSTEM, system),
            (SpanKind.USER, prose(10 + i % 2, 60) + HOSTILE),
            thread=i,
            tenant=f"{HOSTILE}{i % 2}",
            file=f"{HOSTILE}.jsonl",
        )
    return log
