"""`skim bench serve`: figures computed by hand, the load, real servers, and broken servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from skim import LLM
from skim.bench.load import Failure, Reply, Stream, Target, ask
from skim.bench.prompts import Book, Scale, fit_scale, make_prompts, parse_lengths, second_measure
from skim.bench.serve import Load, arrivals, closed_loop, conclude, open_loop
from skim.bench.serve_figures import Run, figures, summarize
from skim.cli.bench import serve as bench_serve
from skim.cli.main import exit_code, main
from skim.cli.settings.parser import Parser
from skim.errors import ConfigError
from skim.measure.report import MeasurementError, Report
from tests import tiny
from tests.live import LiveServer, serving

SCHEMA = json.loads(resources.files("skim").joinpath("data", "report.schema.json").read_text())


def parser() -> Parser:
    made = Parser(prog="skim bench serve")
    bench_serve.configure(made)
    return made


def run(*arguments: str) -> int:
    return bench_serve.run(parser().parse_args(arguments))


def report_in(file: Path) -> Report:
    """The report in a file, checked against the schema."""
    jsonschema_rs.validate(SCHEMA, json.loads(file.read_text()))
    return Report.from_json(file.read_text())


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIM_API_KEY", raising=False)


# -- figures computed by hand


def event(text: str | None = None, finish: str | None = None, *, chat: bool = True, **more: Any) -> str:
    body = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
    return "data: " + json.dumps({"choices": [{**body, "finish_reason": finish}], **more})


USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}
DONE = "data: [DONE]"


def read(*lines: tuple[float, str]) -> Reply | Failure:
    stream = Stream(due=10.0)
    for now, line in lines:
        if failure := stream.add(line, now):
            return failure
    return stream.reply()


@pytest.mark.parametrize("chat", [True, False])
def test_times_are_those_of_chunks_with_text_and_of_the_last_choice(chat: bool) -> None:
    found = read(
        (10.05, ": ping"),
        (10.1, event("", chat=chat)),  # a role, or an incomplete character
        (10.5, event("Call", chat=chat)),
        (10.7, event(" me", chat=chat)),
        (11.0, event(" Ish", chat=chat)),
        (11.1, event(None, "length", chat=chat)),
        (11.2, "data: " + json.dumps({"choices": [], "usage": USAGE})),
        (11.2, DONE),
    )
    assert isinstance(found, Reply)
    assert (found.ttft, found.e2e) == pytest.approx((0.5, 1.1))
    assert found.gaps == pytest.approx((0.2, 0.3))
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (30, 4, 16)
    made = figures([Run(2.0, [found])])
    assert made["ttft_mean"].value == pytest.approx(500)
    assert made["tpot_mean"].value == pytest.approx(200), "(1.1 - 0.5) / (4 - 1) seconds"
    assert made["itl_mean"].value == pytest.approx(250)
    assert made["cached"].value == pytest.approx(16 / 30)


def test_the_usage_may_come_with_the_last_choice_and_reasoning_is_text() -> None:
    thought = 'data: {"choices": [{"delta": {"reasoning_content": "Hm"}}]}'
    found = read((10.2, thought), (10.4, event("x", "stop", usage=USAGE)), (10.4, DONE))
    assert isinstance(found, Reply)
    assert found.ttft == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([], "no stream"),
        (['{"choices": [{"text": "x"}]}'], "no stream"),
        ([event("x")], "cut stream"),
        ([event("x", "stop", usage=USAGE)], "cut stream"),
        ([event("x", "stop"), DONE], "no usage"),
        ([event("x", "stop", usage={"total_tokens": 3}), DONE], "no usage"),
        ([event("", "stop", usage=USAGE), DONE], "empty reply"),
        ([event("x", "abort", usage=USAGE), DONE], "unfinished reply"),
        ([event("x", usage=USAGE), DONE], "unfinished reply"),
        ([event("x"), 'data: {"error": {"message": "out of memory"}}'], "error in the stream"),
        (["error: it broke"], "error in the stream"),
        (["data: {"], "garbled stream"),
        (["data: []"], "garbled stream"),
    ],
)
def test_incomplete_replies_fail_by_kind(lines: list[str], kind: str) -> None:
    found = read(*((11.0, line) for line in lines))
    assert isinstance(found, Failure)
    assert found.kind == kind


def reply(ttft: float, e2e: float, prompt: int, output: int, gaps: tuple[float, ...] = ()) -> Reply:
    return Reply(ttft, e2e, gaps, prompt, output)


def test_rates_cover_the_whole_run_and_have_the_range_of_the_runs() -> None:
    replies = [reply(0.1, 0.4, 100, 4), reply(0.3, 0.8, 200, 6)]
    made = figures([Run(2.0, replies), Run(4.0, replies)])
    rates = {name: made[f"{name}_throughput"] for name in ("request", "output", "total")}
    assert {name: (one.low, one.value, one.high) for name, one in rates.items()} == {
        "request": (0.5, 0.75, 1.0),
        "output": (2.5, 3.75, 5.0),
        "total": (77.5, 116.25, 155.0),
    }
    assert made["successful"].value == 4
    assert (made["prompt_tokens"].low, made["prompt_tokens"].value, made["prompt_tokens"].high) == (
        100,
        150,
        200,
    )
    assert made["ttft_median"].value == pytest.approx(200)
    assert made["ttft_p99"].value == pytest.approx(300)
    assert "cached" not in made, "the server does not report cached tokens"
    assert "itl_mean" not in made, "replies of one chunk have no gaps"


def test_replies_of_one_token_have_no_time_per_output_token() -> None:
    assert "tpot_mean" not in figures([Run(1.0, [reply(0.1, 0.1, 9, 1)])])
    both = figures([Run(1.0, [reply(0.1, 0.1, 9, 1), reply(0.1, 0.3, 9, 3)])])
    assert (both["tpot_mean"].value, both["tpot_mean"].n) == (pytest.approx(100), 1)


def test_latency_intervals_contain_their_value() -> None:
    groups = [[float(i)] for i in range(1, 101)]
    found = summarize(groups)
    assert found["mean"].value == pytest.approx(50.5)
    assert found["p99"].value == pytest.approx(99.01)
    # The mean's standard error is 28.87 / 10.
    assert (found["mean"].low, found["mean"].high) == pytest.approx((44.8, 56.2), abs=1.0)
    assert all(one.low <= one.value <= one.high for one in found.values())
    assert found == summarize(groups)


# -- the load


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("512", 512, 512),
        ("200,800", 200, 800),
        ("uniform:200-800", 200, 800),
        ("lognormal:512,0.5", 60, 4000),
    ],
)
def test_prompt_lengths_are_drawn_as_asked(text: str, low: int, high: int) -> None:
    lengths = parse_lengths(text)
    drawn = [lengths.draw(random.Random(seed)) for seed in range(400)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert sorted(drawn)[200] == pytest.approx(500, rel=0.2) or text == "200,800"
    if text == "200,800":
        assert set(drawn) == {200, 800}


@pytest.mark.parametrize(
    "text",
    ["", "0", "many", "uniform:9", "uniform:9-2", "lognormal:512", "lognormal:0,1", "normal:5,1", "-5"],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens: .*`lognormal:512,0\.5`"):
        parse_lengths(text)


def test_prompts_share_the_requested_prefix_and_nothing_else() -> None:
    scale = Scale(per_char=0.25, overhead=10)
    lengths = parse_lengths("410,210")
    prompts = make_prompts(Book(), random.Random(0), lengths, scale, 12, shared=0.5)
    assert prompts == make_prompts(Book(), random.Random(0), lengths, scale, 12, shared=0.5)
    assert {round(len(text), -2) for text in prompts} == {800, 1600}
    for a, b in itertools.combinations(prompts, 2):
        common = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        half = min(len(a), len(b)) / 2
        assert half - 20 <= common <= half + 40
    alone = make_prompts(Book(), random.Random(0), lengths, scale, 12, shared=0.0)
    assert len({text[:30] for text in alone}) == 12
    assert len(set(make_prompts(Book(), random.Random(0), parse_lengths("99"), scale, 5, shared=1.0))) == 1


def test_a_prompt_may_be_longer_than_the_book() -> None:
    assert len(Book().passage(random.Random(0), 3_000_000)) == pytest.approx(3_000_000, abs=100)


def test_the_scale_is_the_line_through_two_requests() -> None:
    scale = fit_scale((120, 60), (520, 160))
    assert scale == Scale(per_char=0.25, overhead=30)
    assert scale.tokens(1000) == 280
    assert scale.chars(280) == 1000
    assert scale.chars(5) == 1, "a template may be longer than the requested prompt"
    assert second_measure(120, 128) == 480, "a vocabulary of bytes: four times the first is enough"
    assert second_measure(30, 100_000) == 8192
    with pytest.raises(MeasurementError, match="5 prompt tokens for 120 characters and 5 for 520"):
        fit_scale((120, 5), (520, 5))


def test_closed_loop_clients_have_one_request_at_a_time() -> None:
    in_flight: list[int] = [0]
    most: list[int] = []
    asked: list[str] = []

    async def one(text: str, due: float) -> Reply:
        asked.append(text)
        in_flight[0] += 1
        most.append(in_flight[0])
        await asyncio.sleep(0)
        in_flight[0] -= 1
        return reply(0, 0, 1, 1)

    texts = [str(i) for i in range(20)]
    assert len(asyncio.run(closed_loop(texts, 3, one))) == 20
    assert asked == texts
    assert max(most) == 3


def test_arrivals_are_a_poisson_process_set_by_rate_and_seed() -> None:
    times = arrivals(random.Random(7), 10.0, 10_001)
    assert times == arrivals(random.Random(7), 10.0, 10_001)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.05)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02), "1 / e"


def test_open_loop_requests_are_sent_on_time_without_waiting_for_replies() -> None:
    async def scene() -> tuple[list[float], float]:
        all_there = asyncio.Event()
        dues: list[float] = []

        async def one(text: str, due: float) -> Reply:
            dues.append(due)
            if len(dues) == 3:
                all_there.set()
            await asyncio.wait_for(all_there.wait(), 20)
            return reply(0, 0, 1, 1)

        start = time.perf_counter()
        await open_loop(["a", "b", "c"], [0.0, 0.01, 0.05], one)
        return dues, start

    dues, start = asyncio.run(scene())
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.01, 0.05])
    assert dues[0] >= start


def test_a_failed_request_fails_the_row_and_nothing_is_averaged() -> None:
    load = Load(parse_lengths("9"), requests=4, output_tokens=3, concurrency=1)
    good = reply(0.1, 0.2, 9, 3)
    row = conclude(load, [Run(1.0, [good, good])], [good, Failure("HTTP 500", "oh"), good])
    assert row.failed == "2 of 4 requests failed: HTTP 500 x1 (oh); no reply x1"
    assert not row.figures
    assert row.notes == {"successful": 2, "failed": 2, "errors": {"HTTP 500": 1, "no reply": 1}}
    assert conclude(load, [Run(1.0, [good] * 4)], [good] * 4).failed is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "requests must be at least 1"),
        (["--concurrency", "0"], "concurrency must be at least 1"),
        (["--shared-prefix", "1.5"], r"shared_prefix must be in \[0, 1\], got 1.5"),
        (["--prompt-tokens", "x"], "--prompt-tokens: 'x'"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_sent(arguments: list[str], words: str) -> None:
    given = arguments if "--concurrency" in arguments else ["--concurrency", "1", *arguments]
    with pytest.raises(ConfigError, match=words):
        run("http://127.0.0.1:9", *given)


def test_wrong_settings_are_named_by_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--request-rate", "0"], "--request-rate must be above 0 requests per second, got 0.0"),
        (["--concurrency", "1", "--shared-prefix", "2"], "--shared-prefix must be in [0, 1], got 2.0"),
    ):
        assert main(["bench", "serve", "http://127.0.0.1:9", *arguments]) == 2
        assert capsys.readouterr().err == f"skim bench serve: {words}\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1", ""])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^URL: .* is not an address such as http://127.0.0.1:8000: "):
        run(url, "--concurrency", "1")


def test_a_password_in_the_url_is_used_and_never_shown() -> None:
    target = Target("http://me:secret@127.0.0.1:8000/v1/", api_key="k3y")
    assert target.shown == "http://127.0.0.1:8000"
    assert "k3y" not in repr(target)
    with pytest.raises(ConfigError) as error:
        Target("htp://me:secret@host")
    assert "secret" not in str(error.value)


def test_the_command_of_a_report_repeats_the_run() -> None:
    words = [
        *("http://me:secret@127.0.0.1:8000/v1", "--model", "some", "--api", "chat", "--requests", "5"),
        *("--concurrency", "1", "2", "--prompt-tokens", "99", "uniform:5-9", "--output-tokens", "7"),
        *("--shared-prefix", "0.5", "--ignore-eos", "--repeats", "2", "--seed", "3", "--timeout", "12.5"),
        *("--json", "a.json", "--html", "b.html"),
    ]
    args = parser().parse_args(words)
    command = bench_serve.command_of(args, Target(args.url))
    again = parser().parse_args(command[3:])
    left_out = {"url": "http://127.0.0.1:8000", "json": None, "html": None}
    assert vars(again) == {**vars(args), **left_out}


@pytest.mark.parametrize(
    "error",
    [
        httpx.ReadError("cut"),
        httpx.StreamClosed(),
        httpx.InvalidURL("no address"),
        httpx.TooManyRedirects("round and round"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "broken"),
        RuntimeError("a bug"),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_a_request_is_a_failure(error: Exception) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise error

    async def scene() -> Reply | Failure:
        async with httpx.AsyncClient(
            base_url="http://127.0.0.1", transport=httpx.MockTransport(refuse)
        ) as client:
            return await ask(client, Target("http://127.0.0.1"), "text", 1, 0.0)

    found = asyncio.run(scene())
    assert isinstance(found, Failure)
    assert found.kind
    assert found.detail


# -- a server from the standard library, working or broken


@dataclass
class Fake:
    """A server that counts four characters as a token; `faults` names the fault of each broken request."""

    url: str = ""
    faults: dict[int | str, str] = field(default_factory=dict)  # by number from 1, or "all"
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    numbers = itertools.count(1)
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = next(numbers)
            fake.asked.append(body)
            fake.keys.append(self.headers["Authorization"])
            fault = fake.faults.get(number) or fake.faults.get("all", "")
            if fault.startswith("HTTP"):
                self.answer(int(fault[5:]), {"error": {"message": "the server is unwell"}})
                return
            self.send_response(200)
            self.end_headers()
            for line in self.stream(body, fault):
                self.wfile.write(f"{line}\n\n".encode())
                self.wfile.flush()

        def stream(self, body: dict[str, Any], fault: str) -> Iterator[str]:
            chat = "messages" in body
            text = body["messages"][0]["content"] if chat else body["prompt"]
            count = body["max_tokens"] + {"long": 5, "short": -1}.get(fault, 0)
            usage: Any = {"prompt_tokens": len(text) // 4 + 7 * chat, "completion_tokens": count}
            if fault == "ignores the prompt":
                usage["prompt_tokens"] = 5
            if fault == "hangs":
                stop.wait(20)
            if fault == "closes":
                return
            for i in range(0 if fault == "empty" else count):
                if fault == "cuts" and i:
                    return
                yield event(" word", chat=chat)
            if fault == "breaks":
                yield 'data: {"error": {"message": "out of memory"}}'
            yield event(None, "abort" if fault == "aborts" else "length", chat=chat)
            if fault != "no usage":
                yield "data: " + json.dumps({"choices": [], "usage": usage})
            yield DONE

        def answer(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with serving(Handler) as fake.url:
        yield fake
        stop.set()


SMALL = ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "200", "--output-tokens", "3"]
FAULTS = {
    "HTTP 500": "HTTP 500",
    "HTTP 429": "HTTP 429",
    "empty": "empty reply",
    "cuts": "cut stream",
    "closes": "no stream",
    "breaks": "error in the stream",
    "aborts": "unfinished reply",
    "no usage": "no usage",
    "ignores the prompt": "prompt ignored",
    "hangs": "timeout",
    "long": "too long",
    "short": "too short",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_broken_reply_fails_the_row_with_its_kind(
    fake: Fake, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.faults = {4: fault}  # the second of the load: two requests measure the scale first
    file = tmp_path / "report.json"
    patience = "2" if fault == "hangs" else "60"
    assert run(fake.url, *SMALL, "--ignore-eos", "--timeout", patience, "--json", str(file)) == 1
    assert f"1 of 4 requests failed: {FAULTS[fault]} x1" in capsys.readouterr().out
    [row] = report_in(file).rows
    assert not row.figures
    assert row.notes == {"successful": 3, "failed": 1, "errors": {FAULTS[fault]: 1}}


@pytest.mark.parametrize("fault", ["HTTP 500", "empty", "cuts", "no usage", "ignores the prompt"])
def test_a_server_that_is_always_broken_fails_every_row(
    fake: Fake, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.faults = {"all": fault}
    page = tmp_path / "page.html"
    assert run(fake.url, *SMALL, "--prompt-tokens", "200", "300", "--html", str(page)) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert "2 of 2 rows failed" in page.read_text()
    assert "<svg" not in page.read_text()


def test_rows_fail_independently(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.faults = {8: "HTTP 503"}  # in the second row
    assert run(fake.url, *SMALL[2:], "--concurrency", "1", "4") == 1
    out = capsys.readouterr().out
    assert "FAILED concurrency 4, prompt 200, output 3: 1 of 4" in out
    assert "Successful requests" in out


def test_a_load_is_sent_as_requested(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKIM_API_KEY", "k3y")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    file, html = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["--request-rate", "200", "--requests", "5", "--prompt-tokens", "300", "--output-tokens", "3"]
    more = [
        "--api",
        "chat",
        "--repeats",
        "2",
        "--shared-prefix",
        "0.5",
        "--json",
        str(file),
        "--html",
        str(html),
    ]
    assert run(f"{fake.url}/v1", *arguments, *more) == 0
    load = fake.asked[2:]
    assert len(load) == 10
    assert set(fake.keys) == {"Bearer k3y"}
    assert all(body["model"] == "first" and body["max_tokens"] == 3 for body in load)
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in load)
    assert all("ignore_eos" not in body for body in load)
    texts = [body["messages"][0]["content"] for body in load]
    assert len(set(texts)) == 10
    assert len({text[:500] for text in texts}) == 2, "the repeats share nothing, or the second would be warm"

    report = report_in(file)
    [row] = report.rows
    assert row.key == {"request_rate": 200.0, "prompt": "300", "output": 3}
    assert row.figures["prompt_tokens"].value == pytest.approx(300, rel=0.05)
    assert (row.figures["output_tokens"].value, row.figures["successful"].value) == (3, 10)
    assert row.figures["request_throughput"].n == 2
    assert len(row.notes["requests"]) == 10
    assert "k3y" not in file.read_text() + html.read_text()
    assert report.command[:4] == ["skim", "bench", "serve", fake.url]
    shown = capsys.readouterr()
    assert "Median TTFT (ms)" in shown.out
    assert "4.00 characters per token and 7 tokens around each prompt" in shown.err
    assert html.read_text().count("<svg") == 2


def test_the_same_seed_sends_the_same_texts(fake: Fake) -> None:
    for seed in ("1", "1", "2"):
        run(fake.url, *SMALL, "--seed", seed)
    first, second, third = ([body["prompt"] for body in fake.asked[i : i + 6]] for i in (0, 6, 12))
    assert sorted(first) == sorted(second)
    assert not set(first) & set(third)


@pytest.mark.parametrize("model", [[], ["--model", "some"]])
def test_an_unreachable_server_is_a_one_line_error(model: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MeasurementError, match=f"cannot reach {url}: .*; start a server there") as error:
            run(url, "--concurrency", "1", *model)
    assert exit_code(error.value) == 1
    assert "\n" not in str(error.value)


def test_a_page_that_cannot_be_drawn_is_reported_before_the_load(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        run(fake.url, *SMALL, "--html", str(tmp_path / "page.html"))
    assert not fake.asked


# -- real servers


def checked(file: Path, *, tokens: int, output: int) -> Report:
    """The report in a file, with figures checked against each other."""
    report = report_in(file)
    assert not report.failures
    for row in report.rows:
        found = row.figures
        assert found["prompt_tokens"].value == pytest.approx(tokens, rel=0.25)
        assert found["output_tokens"].value == output
        for one in row.notes["requests"]:
            assert 0 < one["ttft_ms"] <= one["e2e_ms"] <= found["duration"].value * 1e3
        assert found["output_throughput"].value == pytest.approx(
            sum(one["output_tokens"] for one in row.notes["requests"]) / found["duration"].value
        )
        assert found["ttft_p99"].value >= found["ttft_median"].value > 0
        assert found["tpot_mean"].value > 0
    return report


def test_our_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.save("llama", tmp_path / "llama")
    file = tmp_path / "report.json"
    arguments = ["--prompt-tokens", "160", "--output-tokens", "8", "--shared-prefix", "0.5", "--ignore-eos"]
    with LLM(path, progress=False, kv_memory="8M", max_num_seqs=4) as llm, LiveServer(llm) as server:
        load = [server.url, "--requests", "6", "--concurrency", "1", "3", *arguments]
        assert run(*load, "--json", str(file)) == 0
        report = checked(file, tokens=160, output=8)
        assert [row.key["concurrency"] for row in report.rows] == [1, 3]
        assert 0.2 < report.rows[0].figures["cached"].value < 0.6, "half of five out of six prompts"
        assert "warm" not in capsys.readouterr().err

        assert run(*load) == 0
        assert capsys.readouterr().err.count("warm: the server had") == 2, "it has read these prompts before"

        assert run(server.url, "--concurrency", "1", "--requests", "2", "--prompt-tokens", "5000") == 1
        assert "FAILED" in capsys.readouterr().out, "the context window is 1024 tokens"


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_llama_cpps_server(api: str, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    from skim.models.bundled import gguf_path

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_path(progress=False))
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 1024, 2, 0, -1
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = 1  # more threads would spin against each other on shared cores
    file = tmp_path / "report.json"
    server = xllamacpp.Server(params)
    try:
        load = ["--requests", "3", "--concurrency", "2", "--prompt-tokens", "80", "--output-tokens", "4"]
        url = server.listening_address
        assert run(url, "--api", api, *load, "--ignore-eos", "--json", str(file)) == 0
    finally:
        del server
    checked(file, tokens=80, output=4)
