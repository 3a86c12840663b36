"""Random operations: on a host, by weights, with every check after each.

Operations come in *lives*, each on a fresh host and from a seed of its own, so that a failure is found again
in seconds.
"""

import random
import time
from collections import Counter

from hosts import CoreHost, EngineHost
from texts import Texts

HOSTS = {"core": CoreHost, "engine": EngineHost}
LIFE = 2000
"""Operations of a life, unless told otherwise."""
WEIGHTS = {
    "submit": 30,
    "advance": 70,
    "hang_up": 5,
    "finish": 3,
    "publish": 4,
    "evict": 3,
    "flush": 0.2,
    "hold": 3,
    "let_go": 3,
    "change_mode": 1,
    "reload": 1,
    "drain": 0.3,
    "restart": 0.15,
}


class World:
    """A host and the texts that are sent to it: the operations, and the check after each.

    Args:
        host: a name from HOSTS.
        rng: random.Random, or hypothesis' stand-in for it.
    """

    def __init__(self, host, rng):
        self.counts = Counter()
        self.host = HOSTS[host](rng, self.counts)
        self._new_texts(rng)

    def operate(self, operation, rng):
        """Do one operation and check everything."""
        self.counts[f"operations: {operation}"] += 1
        getattr(self, f"_{operation}", self._other)(rng, operation)
        self.host.check()

    def close(self):
        """Let everybody hang up; nothing may be left."""
        self.host.close()

    def _submit(self, rng, _):
        scope = rng.choice(self.host.settings.scopes)
        self.host.submit(rng, scope, self.texts.prompt(rng, scope, self.counts))

    def _hold(self, rng, _):
        scope = rng.choice(self.host.settings.scopes)
        self.host.hold(rng, scope, self.texts.prompt(rng, scope, Counter()))

    def _restart(self, rng, _):
        self.host.close()
        self.host.restart(rng)
        self._new_texts(rng)

    def _other(self, rng, operation):
        ended = getattr(self.host, operation)(rng)
        if ended is not None:
            self.texts.remember(*ended)

    def _new_texts(self, rng):
        self.texts = Texts(rng, self.host.settings.unit, self.host.settings.longest)


class Broken(AssertionError):  # noqa: N818 - it is what was found to be broken
    """A check failed; says how to see it again."""

    def __init__(self, message, operations):
        super().__init__(message)
        self.operations = operations


def live(host, seed, operations=LIFE):
    """Do random operations on a fresh host; return the counts, or raise Broken."""
    rng = random.Random(seed)
    world = World(host, rng)
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations)
    at = 0
    try:
        for name in names:
            at += 1
            world.operate(name, rng)
        world.close()
    except Exception as error:
        last = " ".join(names[max(0, at - 10) : at])
        again = f"python tests/operations/drive.py --host {host} --seed {seed} --operations {operations}"
        raise Broken(f"{host}: operation {at} of seed {seed} ({last}): {error!r}\n{again}", at) from error
    return world.counts


def drive(host, seed, *, operations=None, seconds=None, life=LIFE):
    """Live until so many operations are done or so many seconds have passed; return counts and seconds."""
    counts, start = Counter(), time.perf_counter()
    while done(counts) < operations if operations is not None else time.perf_counter() - start < seconds:
        counts += live(host, seed, life if operations is None else min(life, operations - done(counts)))
        seed += 1
    return counts, time.perf_counter() - start


def done(counts):
    """Count the operations."""
    return sum(counts[f"operations: {name}"] for name in WEIGHTS)
