"""Load on a running server: the schedule of requests, the checks of replies, and the resulting row.

A row stands for all of its requests or fails: a request that was refused, cut, empty or answered without
reading its prompt is not left out of the averages but fails the row.
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
"""Minimum share of the expected prompt tokens. Natural text varies less; a cut or skipped prompt, more."""

SLACK = 8  # tokens of tolerance beyond that, for short prompts


@dataclass(frozen=True)
class Load:
    """The requests of one row, sent by a number of clients or at a request rate."""

    lengths: Lengths
    requests: int
    output_tokens: int
    concurrency: int | None = None
    request_rate: float | None = None  # per second, Poisson arrivals
    shared_prefix: float = 0.0
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("output_tokens", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", fields=name)
        if (self.concurrency is None) == (self.request_rate is None):
            raise ConfigError("a load needs either a concurrency or a request_rate, not both")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}", fields="concurrency")
        if self.request_rate is not None and not 0 < self.request_rate < 1e6:
            raise ConfigError(
                f"request_rate must be above 0 requests per second, got {self.request_rate}",
                fields="request_rate",
            )
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(
                f"shared_prefix must be in [0, 1], got {self.shared_prefix}", fields="shared_prefix"
            )

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
    """One row for each load, and the model and scale of the server."""

    rows: list[Row]
    model: str
    scale: Scale | None  # None if the first requests failed


def measure(target: Target, loads: Sequence[Load]) -> Measured:
    """Run the loads one after the other. Raise if the server cannot be reached."""
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
    """Measure tokens per character at this server with two requests, which also warm it up."""
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
    """Run a load once per repeat, with new texts each time so that no repeat is warmer."""

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
            found = await closed_loop(texts, load.concurrency, one)
        else:
            found = await open_loop(texts, arrivals(rng, load.request_rate or 1.0, len(texts)), one)
        runs.append(Run(time.perf_counter() - start, [one for one in found if isinstance(one, Reply)]))
        outcomes += found
    return conclude(load, runs, outcomes)


def conclude(load: Load, runs: Sequence[Run], outcomes: Sequence[Reply | Failure]) -> Row:
    """A row of figures if every request is valid, otherwise a failed row with the reasons by kind."""
    asked = load.requests * load.repeats
    failures = [one for one in outcomes if isinstance(one, Failure)]
    if not failures and len(outcomes) == asked:
        return Row(load.key, figures(runs), notes=notes(runs))
    kinds = Counter(failure.kind for failure in failures)
    if asked > len(outcomes):
        kinds["no reply"] += asked - len(outcomes)
    first = {failure.kind: failure.detail for failure in reversed(failures)}
    reasons = "; ".join(
        f"{kind} x{count}" + (f" ({first[kind]})" if first.get(kind) else "")
        for kind, count in kinds.most_common()
    )
    counts = {"successful": asked - kinds.total(), "failed": kinds.total(), "errors": dict(kinds)}
    return Row(load.key, failed=f"{kinds.total()} of {asked} requests failed: {reasons}", notes=counts)


def judge(reply: Reply, text: str, load: Load, scale: Scale, target: Target) -> Reply | Failure:
    """Fail a complete reply if its prompt was not read or its length is not the requested one."""
    expected = scale.tokens(len(text))
    if reply.prompt_tokens < expected * LEAST_PROMPT - SLACK:
        return Failure(
            "prompt ignored",
            f"usage reports {reply.prompt_tokens} prompt tokens for {len(text)} characters, but about "
            f"{expected:.0f} were sent",
        )
    if reply.output_tokens < 1:
        return Failure("empty reply", "usage reports no generated token")
    if reply.output_tokens > load.output_tokens:
        return Failure("too long", f"{reply.output_tokens} tokens, max_tokens was {load.output_tokens}")
    if target.ignore_eos and reply.output_tokens < load.output_tokens:
        return Failure(
            "too short",
            f"{reply.output_tokens} tokens of {load.output_tokens}: the server does not support ignore_eos, "
            "or its context window is full",
        )
    return reply


# -- when requests are sent

One = Callable[[str, float], Awaitable[Reply | Failure]]


async def closed_loop(texts: Sequence[str], clients: int, one: One) -> list[Reply | Failure]:
    """Each of `clients` sends its next request as soon as it has the previous reply."""
    waiting = iter(texts)
    found: list[Reply | Failure] = []

    async def client() -> None:
        for text in waiting:
            found.append(await one(text, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(min(clients, len(texts)))))
    return found


def arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds; the first is 0."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times


async def open_loop(texts: Sequence[str], times: Sequence[float], one: One) -> list[Reply | Failure]:
    """Send each request at its time, whether the others are answered or not. Latency counts from then."""
    start = time.perf_counter()

    async def client(text: str, after: float) -> Reply | Failure:
        await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
        return await one(text, start + after)

    return list(await asyncio.gather(*map(client, texts, times)))
