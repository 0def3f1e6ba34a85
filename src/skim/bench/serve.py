"""Load against a running server: who asks when, which replies count, and what that makes of the row.

A row stands for all of its requests or fails: one that was refused, cut, empty or answered without its prompt
is not left out of the averages but ends them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skim.bench.load import NO_CONNECTION, Failure, Reply, Target, Unreachable, ask, first_model, unreachable
from skim.bench.prompts import FIRST, Book, Lengths, Scale, fit_scale, make_prompts, second_measure
from skim.bench.serve_figures import Run, figures, notes
from skim.errors import ConfigError
from skim.measure.report import Key, MeasurementError, Row

if TYPE_CHECKING:
    import httpx

LEAST_PROMPT = 0.75
"""Of the expected prompt tokens: natural text varies less, a prompt that was cut or skipped more."""

SLACK = 8  # tokens by which short prompts may miss it


@dataclass(frozen=True)
class Load:
    """What one row sends: so many requests, by so many clients or at so many a second."""

    lengths: Lengths
    requests: int
    output_tokens: int
    concurrency: int | None = None
    request_rate: float | None = None  # a second, at random moments (Poisson)
    shared_prefix: float = 0.0
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("output_tokens", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if (self.concurrency is None) == (self.request_rate is None):
            raise ConfigError("a load has a concurrency or a request_rate, and not both")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.request_rate is not None and not 0 < self.request_rate < 1e6:
            raise ConfigError(f"request_rate must be requests a second above 0, got {self.request_rate}")
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(f"shared_prefix must be in [0, 1], got {self.shared_prefix}")

    @property
    def key(self) -> dict[str, Key]:
        by: dict[str, Key] = (
            {"concurrency": self.concurrency}
            if self.concurrency is not None
            else {"request_rate": self.request_rate or 0.0}
        )
        return {**by, "prompt": self.lengths.text, "output": self.output_tokens}


@dataclass(frozen=True)
class Measured:
    """The rows, one for each load, and what was learnt of the server on the way."""

    rows: list[Row]
    model: str
    scale: Scale | None  # none where the first requests failed


def measure(target: Target, loads: Sequence[Load]) -> Measured:
    """Run the loads one after the other. A server that cannot be reached is an error, not a row."""
    return asyncio.run(_measure(target, loads))


async def _measure(target: Target, loads: Sequence[Load]) -> Measured:
    book = Book()
    async with target.client() as client:
        if target.model is None:
            target = replace(target, model=await first_model(client, target))
        try:
            scale = await find_scale(client, target, loads, book)
        except Unreachable:
            raise
        except MeasurementError as error:
            return Measured([Row(load.key, failed=str(error)) for load in loads], str(target.model), None)
        rows = [
            await run_load(client, target, load, number, book, scale) for number, load in enumerate(loads)
        ]
        return Measured(rows, str(target.model), scale)


async def find_scale(client: httpx.AsyncClient, target: Target, loads: Sequence[Load], book: Book) -> Scale:
    """Tokens by characters at this server, from two requests; they also wake it up."""
    rng = random.Random(f"{loads[0].seed} scale")
    wanted = max(load.lengths.typical for load in loads)
    chars, points = FIRST, []
    for _ in range(2):
        text = book.passage(rng, chars)
        found = await ask(client, target, text, 1, time.perf_counter())
        if isinstance(found, Failure):
            if found.kind == NO_CONNECTION:
                raise unreachable(target, found.detail)
            raise MeasurementError(f"the first request failed: {found.kind}: {found.detail}")
        points.append((len(text), found.prompt_tokens))
        chars = second_measure(found.prompt_tokens, wanted)
    return fit_scale(points[0], points[1])


async def run_load(
    client: httpx.AsyncClient, target: Target, load: Load, number: int, book: Book, scale: Scale
) -> Row:
    """A row: the load once for each repeat, each time with other texts, so that no repeat is warmer."""

    async def one(text: str, due: float) -> Reply | Failure:
        found = await ask(client, target, text, load.output_tokens, due)
        return found if isinstance(found, Failure) else judge(found, text, load, scale, target)

    runs: list[Run] = []
    outcomes: list[Reply | Failure] = []
    for repeat in range(load.repeats):
        rng = random.Random(f"{load.seed} {number} {repeat}")
        texts = make_prompts(book, rng, load.lengths, scale, load.requests, load.shared_prefix)
        start = time.perf_counter()
        if load.concurrency is not None:
            found = await in_turns(texts, load.concurrency, one)
        else:
            found = await at_random(texts, arrivals(rng, load.request_rate or 1.0, len(texts)), one)
        runs.append(Run(time.perf_counter() - start, [one for one in found if isinstance(one, Reply)]))
        outcomes += found
    return conclude(load, runs, outcomes)


def conclude(load: Load, runs: Sequence[Run], outcomes: Sequence[Reply | Failure]) -> Row:
    """Figures if every request counts, or else the reasons by kind and no figures at all."""
    asked = load.requests * load.repeats
    failures = [one for one in outcomes if isinstance(one, Failure)]
    if not failures and len(outcomes) == asked:
        return Row(load.key, figures(runs), notes=notes(runs))
    kinds = Counter(failure.kind for failure in failures)
    if asked > len(outcomes):
        kinds["no reply"] += asked - len(outcomes)
    first = {failure.kind: failure.detail for failure in reversed(failures)}
    told = "; ".join(
        f"{kind} x{count}" + (f" ({first[kind]})" if first.get(kind) else "")
        for kind, count in kinds.most_common()
    )
    counts = {"successful": asked - kinds.total(), "failed": kinds.total(), "errors": dict(kinds)}
    return Row(load.key, failed=f"{kinds.total()} of {asked} requests failed: {told}", notes=counts)


def judge(reply: Reply, text: str, load: Load, scale: Scale, target: Target) -> Reply | Failure:
    """A whole reply may still not count: its prompt was not read, or its length is not what was asked."""
    expected = scale.tokens(len(text))
    if reply.prompt_tokens < expected * LEAST_PROMPT - SLACK:
        return Failure(
            "prompt ignored",
            f"usage says {reply.prompt_tokens} prompt tokens for {len(text)} characters, about "
            f"{expected:.0f} were sent",
        )
    if reply.output_tokens < 1:
        return Failure("empty reply", "usage says that no token was written")
    if reply.output_tokens > load.output_tokens:
        return Failure("too long", f"{reply.output_tokens} tokens, max_tokens was {load.output_tokens}")
    if target.ignore_eos and reply.output_tokens < load.output_tokens:
        return Failure(
            "too short",
            f"{reply.output_tokens} tokens of {load.output_tokens}: the server does not know ignore_eos, or "
            "its window is full",
        )
    return reply


# -- who asks when

One = Callable[[str, float], Awaitable[Reply | Failure]]


async def in_turns(texts: Sequence[str], clients: int, one: One) -> list[Reply | Failure]:
    """So many clients, each of which asks again as soon as it has its reply."""
    waiting = iter(texts)
    found: list[Reply | Failure] = []

    async def client() -> None:
        for text in waiting:
            found.append(await one(text, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(min(clients, len(texts)))))
    return found


def arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """Seconds at which requests arrive that do not know of each other, the first one at once."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times


async def at_random(texts: Sequence[str], times: Sequence[float], one: One) -> list[Reply | Failure]:
    """Each request at its time, whether the others are answered or not; it counts from that time on."""
    start = time.perf_counter()

    async def client(text: str, after: float) -> Reply | Failure:
        await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
        return await one(text, start + after)

    return list(await asyncio.gather(*map(client, texts, times)))
