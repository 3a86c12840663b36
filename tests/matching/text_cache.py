"""A stand-in for the cache that owns the rows, a plain model of what it holds, and oracles that know only the model."""

from collections import Counter

import numpy as np

from irminsul.matching import winnow
from irminsul.namespace import Namespace
from irminsul.registry import Registry

NOBODY = Namespace()


class TextCache:
    """Sequences in a registry; the model is a dictionary slot -> (namespace, token, position, previous slot).

    Like the radix cache, it gives equal prefixes of a namespace equal slots, and frees from the end of a text.
    """

    def __init__(self, matcher="winnow64", *, capacity=20_000, seed=1, special_tokens=()):
        self.registry = Registry(capacity, matcher=matcher, seed=seed, special_tokens=special_tokens)
        self.free = list(range(capacity))
        self.model = {}
        self.children = {}  # (namespace, previous slot or None, token) -> slot
        self.continued = Counter()  # how many slots name this one as previous

    def path(self, namespace, tokens):
        """Return the slots of the longest cached prefix."""
        slots = []
        for token in tokens.tolist():
            slot = self.children.get((namespace, slots[-1] if slots else None, token))
            if slot is None:
                break
            slots.append(slot)
        return slots

    def add(self, tokens, namespace=NOBODY, steps=()):
        """Cache a sequence, announcing what is new in one piece or up to each of ``steps`` in turn; return slots."""
        slots = self.path(namespace, tokens)
        held = len(slots)
        for position in range(held, len(tokens)):
            slot = self.free.pop()
            previous = slots[-1] if slots else None
            self.model[slot] = (namespace, int(tokens[position]), position, previous)
            self.children[namespace, previous, int(tokens[position])] = slot
            self.continued[previous] += 1
            slots.append(slot)
        slots = np.array(slots, dtype=np.int32)
        for end in sorted({step for step in steps if held < step < len(tokens)} | {len(tokens)}):
            self.registry.add(namespace, tokens[:end], slots[:end], held)
            held = end
        return slots

    def drop(self, slots):
        """Free the last slots of a text, except those that another text continues."""
        freed = []
        for slot in [slot for slot in slots[::-1].tolist() if slot in self.model]:
            if self.continued[slot]:
                break
            namespace, token, _, previous = self.model.pop(slot)
            del self.children[namespace, previous, token]
            self.continued[previous] -= 1
            freed.append(slot)
        self.registry.drop(np.array(freed, dtype=np.int32))
        self.free.extend(freed)

    def find(self, tokens, start=0, namespace=NOBODY):
        """Look a prompt up and check everything a run promises."""
        runs = self.registry.find(namespace, tokens, start)
        cursor = start
        for run in runs:
            assert cursor <= run.start < run.end <= len(tokens), "runs are ascending, disjoint and inside the tail"
            cursor = run.end
            previous = None
            for offset, slot in enumerate(run.slots.tolist()):
                assert slot in self.model, "a dead slot"
                owner, token, position, before = self.model[slot]
                assert owner == namespace
                assert token == tokens[run.start + offset]
                assert position == run.source_start + offset
                assert previous is None or before == previous, "the donor path is contiguous"
                previous = slot
        return runs

    def texts(self, namespace=NOBODY):
        """Return every maximal cached text of a namespace."""
        texts = []
        for slot, (owner, _, _, _) in self.model.items():
            if owner == namespace and not self.continued[slot]:
                text = []
                step = slot
                while step is not None:
                    text.append(self.model[step][1])
                    step = self.model[step][3]
                texts.append(text[::-1])
        return texts


def oracle_cover(texts, tokens, start, length):
    """Mark the positions of ``tokens[start:]`` in any stretch of ``length`` that some text holds, shape [n]."""
    grams = {gram for text in texts for gram in _grams(text, length)}
    cover = np.zeros(len(tokens), dtype=bool)
    for i, gram in enumerate(_grams(tokens[start:], length)):
        if gram in grams:
            cover[start + i : start + i + length] = True
    return cover


def _grams(text, length):
    data = np.asarray(text, dtype=np.int32).tobytes()
    return [data[4 * i : 4 * (i + length)] for i in range(len(text) - length + 1)]


def cover_of(runs, n):
    """Mark the positions that runs cover, shape [n]."""
    cover = np.zeros(n, dtype=bool)
    for run in runs:
        cover[run.start : run.end] = True
    return cover


def as_tokens(*parts):
    """Join lists and arrays of ids."""
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def agent_mix(rng, pool, n_documents):
    """Assemble a prompt: a header of its own, then documents, some of them cut short or followed by own text."""
    parts = [rng.integers(0, 50_000, int(rng.integers(5, 60)))]
    for _ in range(n_documents):
        document = pool[int(rng.integers(len(pool)))]
        begin = int(rng.integers(0, 40)) if rng.random() < 0.3 else 0
        parts += [document[begin:], rng.integers(0, 50_000, int(rng.integers(0, 30)))]
    return as_tokens(*parts)


def count_comparisons(monkeypatch):
    """Count token comparisons of winnow searches from now on, in a list. Searches must run uncompiled."""
    counted = []

    def count(name, cost):
        function = getattr(winnow, name)

        def counted_call(*args):
            result = function(*args)
            counted.append(cost(args, result))
            return result

        monkeypatch.setattr(winnow, name, counted_call)

    count("tokens_end_at", lambda args, _: args[4])
    count("_extend_right", lambda args, result: result[1] - args[3] + 1)
    count("_extend_left", lambda args, result: args[3] - result + 1)
    return counted
