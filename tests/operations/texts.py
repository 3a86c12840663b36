"""Prompts in which much comes back: passages in another order, next turns, edited, moved and doubled histories."""

import random

from ledger import END, VOCABULARY

KEPT_HISTORIES = 8
FRESH = {"passages": 8, "twice": 3, "random": 1}
"""Kinds of prompts that need no history, with weights."""
OF_A_PROMPT = {"the last one again": 2, "behind the last one's end": 1}
"""Kinds made of the prompt before, which is most often still at work."""
OF_A_HISTORY = {"again": 2, "next turn": 6, "edited": 3, "moved": 3, "doubled": 3}


class Texts:
    """Makes prompts.

    Args:
        rng: random.Random, or hypothesis' stand-in for it.
        unit: about a tenth of a passage's tokens.
        longest: tokens of a prompt.
    """

    def __init__(self, rng, unit, longest):
        self._unit = unit
        self._longest = longest
        self._passages = [_random(rng, unit * rng.randrange(3, 13)) for _ in range(4)]
        # Periodic text is its own donor at every distance.
        self._passages += [_random(rng, 1) * 6 * unit, _random(rng, 2) * 4 * unit]
        self._histories = []
        self._last = []

    def remember(self, scope, tokens):
        """Keep what a request sent and got: later prompts, of any scope, build on it."""
        self._histories = [*self._histories, (scope, list(tokens))][-KEPT_HISTORIES:]

    def prompt(self, rng, scope, counts):
        """Make a prompt of at least one token."""
        weights = FRESH | (OF_A_PROMPT if self._last else {}) | (OF_A_HISTORY if self._histories else {})
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind in FRESH:
            tokens = self._fresh(rng, kind)
        elif kind in OF_A_PROMPT:
            tokens = self._last if kind == "the last one again" else self._last[len(self._last) // 2 :] + self._last
        else:
            own = [entry for entry in self._histories if entry[0] == scope]
            other, history = rng.choice(own if own and rng.random() < 0.7 else self._histories)
            counts["prompts built on another namespace's text"] += other != scope
            tokens = self._changed(rng, kind, history)
        counts[f"prompts: {kind}"] += 1
        self._last = tokens[: self._longest] or [END + 1]
        return tuple(self._last)

    def _fresh(self, rng, kind):
        if kind == "random":
            return self._gap(rng, 20)
        if kind == "twice":
            passage = rng.choice(self._passages)
            return self._gap(rng, 3) + passage + self._gap(rng, 2) + passage + self._gap(rng, 2)
        order = rng.choices(self._passages, k=rng.randrange(1, 4))
        return self._gap(rng, 2) + [token for passage in order for token in passage + self._gap(rng, 1)]

    def _changed(self, rng, kind, history):
        start, end = sorted(rng.randrange(len(history) + 1) for _ in range(2))
        return {
            "again": lambda: history,
            "next turn": lambda: history + self._gap(rng, 4),
            "edited": lambda: history[:start] + self._gap(rng, 2) + history[end:] + self._gap(rng, 1),
            "moved": lambda: _random(rng, rng.randrange(1, 5)) + history,
            "doubled": lambda: history + history[start:end] + self._gap(rng, 1),
        }[kind]()

    def _gap(self, rng, most):
        return _random(rng, rng.randrange(most * self._unit + 1))


def _random(rng, length):
    # One draw a text, not one a token: hypothesis shrinks what it draws.
    tokens = random.Random(rng.randrange(1000))
    return [tokens.randrange(END + 1, VOCABULARY) for _ in range(length)]
