"""Agent transcripts: tool calls with long results, and a question about an old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skim.evals.grading import found_phrases
from skim.evals.haystack import Haystack
from skim.evals.messages import called, result
from skim.evals.room import Message, Turns
from skim.evals.task import Draw, Grades, Sample
from skim.evals.tasks.pairs import MAX_TOKENS, choose
from skim.prefill.pairs import Kind, Pair

SYSTEM = "You look after a server. Use the tools read_log, read_file and list_files."
TASK = "Go through the logs and files. I will have a question when you are done."
DONE = "I have been through all of it."
LATER = 3  # least number of assistant turns after the result with the answer
TOKENS_PER_RESULT = 2000
LEAST_RESULTS = 2 * LATER


@dataclass(frozen=True)
class Form:
    """The results of one tool: lines made of sentences, and facts of one kind among them."""

    tool: str
    path: str
    facts: Kind
    mark: str  # first characters of a line, different in every form
    line: str


FORMS = (
    Form("read_log", "worker-{number}.log", Kind.LOGS, "[", "[{clock}] worker: {sentence}"),
    Form("read_file", "notes-{number}.py", Kind.CODE, "#", "# {sentence}"),
    Form("list_files", "pages/{number}", Kind.TABLE, "page", "page-{number:05}.txt {size} bytes {sentence}"),
)


class Transcript:
    """A system message, a task, tool calls with results made of the text, and then the question.

    The answer is in a result with at least `LATER` assistant turns after it.
    """

    def __init__(self, haystack: Haystack, choose: Callable[[Kind, int, int], Pair] = choose) -> None:
        """`choose` gives the pair of a sample, from its kind, number and seed."""
        self._haystack = haystack
        self._choose = choose
        # A sentence is the same line in every sample, so its tokens are counted once.
        self._lines = {
            sentence: _line(number, sentence) for number, sentence in enumerate(haystack.sentences)
        }

    def draw(self, draw: Draw) -> Sample:
        rng = draw.rng
        form = draw.number % len(FORMS)
        pair = self._choose(FORMS[form].facts, draw.number // len(FORMS), draw.seed)
        count = max(LEAST_RESULTS, draw.room.context // TOKENS_PER_RESULT)
        home = rng.choice(range(form, count - LATER, len(FORMS)))
        depth = rng.random()

        def build(lines: Sequence[str]) -> Turns:
            results = deal(lines, count)
            place = round(depth * len(results[home]))
            results[home][place:place] = pair.passages
            return ((*_messages(results), pair.question),)

        lines = (self._lines[sentence] for sentence in self._haystack.sentences_from(rng))
        turns = draw.room.fill(lines, build, MAX_TOKENS, "\n")
        return Sample(turns, (pair.answer,), MAX_TOKENS, pair.evidence)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_phrases(sample.expected, reply)}


def deal(lines: Sequence[str], count: int) -> list[list[str]]:
    """Deal lines to `count` results: in order, each to results of its form, in equal parts."""
    results: list[list[str]] = [[] for _ in range(count)]
    for first, form in enumerate(FORMS):
        own = [line for line in lines if line.startswith(form.mark)]
        places = range(first, count, len(FORMS))
        edges = [len(own) * index // len(places) for index in range(len(places) + 1)]
        for place, start, end in zip(places, edges, edges[1:], strict=False):
            results[place] += own[start:end]
    return results


def _line(number: int, sentence: str) -> str:
    minutes, seconds = divmod(7 * number, 60)
    clock = f"{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"
    form = FORMS[number % len(FORMS)]
    return form.line.format(number=number, sentence=sentence, size=len(sentence), clock=clock)


def _messages(results: Sequence[Sequence[str]]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for index, lines in enumerate(results):
        form = FORMS[index % len(FORMS)]
        messages.append(called(form.tool, {"path": form.path.format(number=index + 1)}))
        messages.append(result("\n".join(lines)))
    return [*messages, {"role": "assistant", "content": DONE}]
