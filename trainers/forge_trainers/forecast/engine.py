"""Engines and processor cores in simulated time.

In: requests by their lengths, seconds of an engine's iterations. Out: when each request ends and which weights sampled
it. Waits in simulated time only.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import simpy

Process: TypeAlias = Generator[simpy.Event, Any, None]

PROMPT_TOKENS_PER_ITERATION = 2048
"""vLLM's usual `max_num_batched_tokens`: what one iteration computes at most."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Seconds of one iteration of an engine: a fixed part, a part for each sequence and for each prompt token."""

    iteration_s: float
    """Also of an iteration with one sequence."""
    sequence_s: float
    """For each token that is sampled in it."""
    prompt_token_s: float
    """For each prompt token that is computed in it."""
    cores: float = 1.0
    """Processor cores it keeps busy meanwhile, on a host without accelerator."""
    scaling: float = 1.0
    """On n times as many cores it is n**scaling times as fast."""

    def __post_init__(self) -> None:
        for name in ("iteration_s", "sequence_s", "prompt_token_s", "scaling"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"{name}={value} of EngineTimes must be finite and at least 0")
        if self.iteration_s + self.sequence_s <= 0 or self.cores <= 0:
            raise ValueError(f"{self}: an engine needs time and cores above 0")

    def seconds(self, sequences: int, prompt_tokens: int = 0) -> float:
        """Of one iteration."""
        return self.iteration_s + self.sequence_s * sequences + self.prompt_token_s * prompt_tokens


@dataclass(slots=True, eq=False)
class Job:
    """Work on cores."""

    done: simpy.Event
    begins: float
    """By the clock that all jobs share."""
    ends: float
    cores: float


class Cores:
    """Cores that jobs share: where they want more than there are, all slow down alike.

    A clock that all jobs share runs at the common speed, so a job ends when that clock has gone on by its seconds.

    Args:
        env: Whose time it is.
        capacity: Cores; infinity where nothing is shared.
    """

    def __init__(self, env: simpy.Environment, capacity: float = math.inf) -> None:
        if not capacity > 0:
            raise ValueError(f"{capacity} cores; give more than 0")
        self._env, self.capacity = env, capacity
        self._clock, self._seen, self._wanted = 0.0, env.now, 0.0
        self._ends: list[tuple[float, int, Job]] = []
        self._count = self._alarms = self._active = 0
        self.core_s = 0.0
        """Used so far."""

    def start(self, seconds: float, cores: float = 1.0) -> Job:
        """Begin work that takes `seconds` alone, on that many cores; `done` fires at its end."""
        self._tick()
        job = Job(self._env.event(), self._clock, self._clock + seconds, min(cores, self.capacity))
        self._wanted += job.cores
        self._active += 1
        self._push(job)
        return job

    def progress(self, job: Job) -> float:
        """Share of a job that is done, in [0, 1]."""
        self._tick()
        span = job.ends - job.begins
        return min(1.0, (self._clock - job.begins) / span) if span > 0 else 1.0

    def shorten(self, job: Job, share: float) -> None:
        """Let a job end after `share` of what it was."""
        self._tick()
        job.ends = max(self._clock, job.begins + share * (job.ends - job.begins))
        self._push(job)

    def _speed(self) -> float:
        """Of every job, in (0, 1]."""
        return min(1.0, self.capacity / self._wanted) if self._wanted > 0 else 1.0

    def _tick(self) -> None:
        passed, self._seen = self._env.now - self._seen, self._env.now
        self._clock += passed * self._speed()
        self.core_s += passed * self._speed() * self._wanted

    def _push(self, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._ends, (job.ends, self._count, job))
        self._set_alarm()

    def _set_alarm(self) -> None:
        while self._ends and self._ends[0][2].done.triggered:
            heapq.heappop(self._ends)
        self._alarms += 1
        if self._ends:
            due = self._env.timeout(max(0.0, (self._ends[0][0] - self._clock) / self._speed()), value=self._alarms)
            due.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm.value != self._alarms:  # jobs have changed since
            return
        self._tick()
        self._clock = max(self._clock, self._ends[0][0])  # rounding must not leave the first job a little short
        while self._ends and self._ends[0][0] <= self._clock * (1 + _SLACK):
            job = heapq.heappop(self._ends)[2]
            if not job.done.triggered:
                self._active -= 1
                self._wanted = self._wanted - job.cores if self._active else 0.0  # no rounding is carried on
                job.done.succeed()
        self._set_alarm()


class Counts(NamedTuple):
    """What a replica has done up to a moment."""

    iterations: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0


NOTHING = Counts()


@dataclass(slots=True, eq=False)
class Request:
    """A response that is asked for."""

    done: simpy.Event
    prompt_tokens: int
    response_tokens: int
    cached: Sequence[tuple[Hashable, int]] = ()
    """Beginnings of the prompt that the replica may hold: what they are called and their tokens."""
    leaves: Hashable = None
    """What the prompt and the response are called when they are cached; None: not again."""
    versions: Counter[int] = field(default_factory=Counter)
    """Sampled tokens by version of the weights."""
    arrived: Counts = NOTHING
    """What the replica had done when the request arrived."""
    ended: Counts = NOTHING
    asked_s: float = 0.0
    """When it arrived."""
    ended_s: float = 0.0
    ends_at: int = 0
    """Iteration of the replica after which it is complete."""
    marked: int = 0
    """Iteration up to which `versions` counts."""

    def mark(self, iteration: int, version: int) -> None:
        """Tokens since the last mark are of `version`."""
        self.versions[version] += iteration - self.marked
        self.marked = iteration


class Replica:
    """One engine: continuous batching, updates of the weights between two iterations.

    Args:
        env: Whose time it is.
        cores: What it computes on.
        times: Of its iterations, measured on ``times.cores`` cores.
        room: Sequences in one iteration.
        threads: Cores that it may use.
        block: Tokens of a block of the prefix cache; 0 caches nothing.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cores: Cores,
        times: EngineTimes,
        *,
        room: int,
        threads: float = math.inf,
        block: int = 0,
    ) -> None:
        self._env, self._cores, self._times, self._room, self._block = env, cores, times, room, block
        self._demand = min(times.cores, threads)
        self._slower = (times.cores / self._demand) ** times.scaling
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[int, int, Request]] = []
        self._updates: deque[tuple[float, int, simpy.Event]] = deque()
        self._cache: dict[Hashable, int] = {}
        self._news = env.event()
        self._iteration = self._sampled = self._prompted = self._added = 0
        self.changed: Callable[[], object] = lambda: None
        """Called whenever `unfinished` has changed."""
        self.version = 0
        self.busy_s = 0.0
        """Seconds with work so far."""
        self.most_running = 0
        env.process(self._work())

    @property
    def unfinished(self) -> int:
        """Requests without an answer."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request of at least one token; its `done` fires at its end."""
        request.arrived, request.asked_s = self._counts(), self._env.now
        self._waiting.append(request)
        self.changed()
        if len(self._running) < self._room:
            self._wake()

    def update(self, seconds: float, version: int) -> simpy.Event:
        """Load weights after the iteration that runs; fires when they are live."""
        done = self._env.event()
        self._updates.append((seconds, version, done))
        self._wake()
        return done

    def _counts(self) -> Counts:
        return Counts(self._iteration, self._sampled, self._prompted)

    def _wake(self) -> None:
        if not self._news.triggered:
            self._news.succeed()

    def _work(self) -> Process:
        while True:
            if self._updates:
                yield from self._load(*self._updates.popleft())
            elif self._waiting or self._running:
                yield from self._iterate()
            else:
                self._news = self._env.event()
                yield self._news

    def _load(self, seconds: float, version: int, done: simpy.Event) -> Process:
        begun = self._env.now
        yield self._cores.start(seconds).done
        self.busy_s += self._env.now - begun
        for _, _, request in self._running:
            request.mark(self._iteration, self.version)
        self.version = version
        self._cache.clear()  # keys and values of other weights
        done.succeed()

    def _iterate(self) -> Process:
        """One iteration where prompts are read, else as many as nothing changes in."""
        begun = self._env.now
        prompt_tokens = self._admit()
        planned = 1 if prompt_tokens else self._running[0][0] - self._iteration
        sequences = len(self._running)
        self.most_running = max(self.most_running, sequences)
        self._news = self._env.event()
        each_s = self._times.seconds(sequences, prompt_tokens) * self._slower
        job = self._cores.start(planned * each_s, self._demand)
        yield job.done | self._news
        if not job.done.triggered:  # somebody came: the iteration that runs is the last of these
            whole = min(planned, max(1, math.ceil(self._cores.progress(job) * planned - 1e-6)))
            self._cores.shorten(job, whole / planned)
            planned = whole
            yield job.done
        self.busy_s += self._env.now - begun
        self._iteration += planned
        self._sampled += planned * sequences
        while self._running and self._running[0][0] <= self._iteration:
            request = heapq.heappop(self._running)[2]
            request.mark(self._iteration, self.version)
            request.ended, request.ended_s = self._counts(), self._env.now
            if request.leaves is not None:
                self._cache[request.leaves] = request.prompt_tokens + request.response_tokens
            self.changed()
            request.done.succeed()

    def _admit(self) -> int:
        """Take requests into the batch; returns the prompt tokens that have to be computed."""
        taken = 0
        while self._waiting and len(self._running) < self._room:
            request = self._waiting[0]
            # of the prompt, whole blocks are cached
            known = [min(length, self._cache[name]) for name, length in request.cached if name in self._cache]
            held = max(known, default=0) // self._block * self._block if self._block else 0
            tokens = max(1, request.prompt_tokens - held)
            if taken and taken + tokens > PROMPT_TOKENS_PER_ITERATION:
                break
            self._waiting.popleft()
            taken += tokens
            self._cache.update(request.cached)
            request.marked, request.ends_at = self._iteration, self._iteration + request.response_tokens
            self._added += 1
            heapq.heappush(self._running, (request.ends_at, self._added, request))
        self._prompted += taken
        return taken


class SimulatedReplicas:
    """Replicas behind one face, with the rules of `forge_agents.serving.routing`.

    Args:
        replicas: At least one.
        affine: A conversation goes back to the replica that holds it, while that has room or none has.
        room: Requests that a replica works on at the same time.
    """

    def __init__(self, replicas: Sequence[Replica], *, affine: bool, room: int) -> None:
        self.replicas = tuple(replicas)
        self._affine, self._room = affine, room
        self._homes: dict[Hashable, int] = {}
        self._asked = [0] * len(self.replicas)
        self._turn = 0
        self._order = [(replica.unfinished, 0, number) for number, replica in enumerate(self.replicas)]
        """A heap of (requests, when asked last, number). Every change adds an entry and leaves an old one behind: to
        look at each of hundreds of replicas for each request would take longer than all else."""
        heapq.heapify(self._order)
        for number, replica in enumerate(self.replicas):
            replica.changed = functools.partial(self._note, number)

    def ask(self, request: Request, conversation: Hashable) -> None:
        """Hand a request to the replica that the rules say."""
        home = self._homes.get(conversation) if self._affine else None
        least = self._least()
        if home is None or (
            self.replicas[home].unfinished >= self._room and self.replicas[least].unfinished < self._room
        ):
            home = least
            self._turn += 1
            self._asked[home] = self._turn
        self._homes[conversation] = home
        self.replicas[home].add(request)

    def _note(self, number: int) -> None:
        heapq.heappush(self._order, (self.replicas[number].unfinished, self._asked[number], number))

    def _least(self) -> int:
        while True:
            load, asked, number = self._order[0]
            if (load, asked) == (self.replicas[number].unfinished, self._asked[number]):
                return number
            heapq.heappop(self._order)
