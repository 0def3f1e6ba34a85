"""`/v1/skim`: plans a conversation as a skimmed request would, and shows what it would read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skim.config import BUDGETS, PrefillConfig
from skim.llm import LLM, Prepared
from skim.prefill.kept import KeptTexts
from skim.prefill.locate import UnmappableError
from skim.prefill.reading import Planned
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams
from skim.server.chat import prepare
from skim.server.endpoint import Call
from skim.server.errors import ApiError
from skim.server.options import control_tokens_of, prefill_of, refuse_progress
from skim.server.protocol.messages import Message, for_template
from skim.server.protocol.replies import KeptSpan
from skim.server.reply import Reply
from skim.server.retrieval.replies import PlanBudget, PlanUsage, SkimResponse
from skim.server.retrieval.requests import SkimRequest
from skim.server.tasks import Task, Work

GAP = "\n[...]\n"


async def post_skim(call: Call) -> Reply:
    service, request = call.service, call.body
    llm = service.llm
    service.check_model(request.model)
    refuse_progress(request.skim)
    prefill = planning_of(request, llm.config.prefill)
    control_tokens = control_tokens_of(request.skim, service.config)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None
    params = SamplingParams(max_tokens=request.max_tokens)
    found: list[Prepared] = []

    def make() -> Work[Planned]:
        prompt = prepare(
            llm,
            request.messages,
            tools,
            service.dialect,
            skimmed=True,
            control_tokens=control_tokens,
            check=partial(service.check_length, prefill=prefill),
        )
        found.append(prompt)
        # Without the prefix cache a plan is made afresh, and leaves no trace for later turns.
        asked = Request(prompt.tokens, params, prefill, prompt.anatomy, use_prefix_cache=False)
        return Work(len(prompt.tokens), partial(llm.engine.plan, asked))

    planned = await Task[Planned](service, call.log).run("plan", make)
    [prompt] = found
    llm.engine.core.intake.room_for_reply(  # a request that could not be read is refused, as by chat
        len(planned.reading.tokens), planned.reading.end, params, planned.problem
    )
    call.log.fields.update(kept_tokens=len(planned.reading.tokens), fallback=planned.fallback)
    ids = {"id": f"skim-{call.log.id}", "model": service.model_name}

    def write() -> Reply:
        reply = reply_of(llm, request, prompt, planned, prefill, ids)
        return Reply(reply.model_dump_json().encode())

    return await service.off_loop(write, call.log.size, admitted=True)


def planning_of(request: SkimRequest, config: PrefillConfig) -> PrefillConfig:
    """The prefill settings of the plan."""
    prefill = prefill_of(request.skim, config)
    given = request.skim.sparse_prefill if request.skim is not None else None
    if given == "off":
        raise ApiError(
            400, "sparse_prefill is off, so there is no plan; leave it out", param="skim.sparse_prefill"
        )
    return replace(prefill, sparse_prefill=given or "always")


def reply_of(
    llm: LLM,
    request: SkimRequest,
    prompt: Prepared,
    planned: Planned,
    prefill: PrefillConfig,
    ids: dict[str, Any],
) -> SkimResponse:
    plan, count = planned.plan, len(prompt.tokens)
    given = [message.model_dump(exclude_none=True) for message in request.messages]
    messages: list[dict[str, Any]] | None = given
    skipped: list[int] | None = [0] * len(given)
    spans = question = None
    if plan is not None and prompt.text is not None and prompt.offsets is not None:
        texts = KeptTexts(prompt.text, prompt.offsets, plan)
        spans = [
            KeptSpan(start=span.start, end=span.end, reason=span.reason, text=texts.span(span))
            for span in plan.spans
        ]
        asked = [llm.tokenizer.decode(prompt.tokens[start:end]).strip() for start, end in plan.asked]
        question = "\n".join(asked) if asked else None
        gap = GAP if request.gap is None else request.gap
        messages, skipped = kept_messages(texts, request.messages, given, gap)
    return SkimResponse(
        **ids,
        messages=messages,
        skipped_chars=skipped,
        spans=spans,
        question=question,
        budget=budget_of(prefill),
        scorer=plan.scorer if plan is not None else None,
        coverage=plan.coverage if plan is not None else None,
        read_again=plan.read_again if plan is not None else 0,
        positions=plan.positions if plan is not None else "original",
        block_size=plan.block_size if plan is not None else None,
        fallback=planned.fallback,
        problem=planned.problem,
        usage=PlanUsage(prompt_tokens=count, kept_tokens=len(planned.reading.tokens)),
    )


def kept_messages(
    texts: KeptTexts, given: Sequence[Message], messages: list[dict[str, Any]], gap: str
) -> tuple[list[dict[str, Any]] | None, list[int] | None]:
    """The messages as they would be read, and the skipped characters of each."""
    with contextlib.suppress(UnmappableError):
        kept = texts.messages([joined(for_template(one)) for one in given], gap)
        read = [
            message if one.content is None or not one.skipped else {**message, "content": one.content}
            for message, one in zip(messages, kept, strict=True)
        ]
        return read, [one.skipped for one in kept]
    return None, None


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content parts as one text, as the prompt has them."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def budget_of(prefill: PrefillConfig) -> PlanBudget:
    for setting in BUDGETS:
        if (value := getattr(prefill, setting)) is not None:
            return PlanBudget(setting=setting, value=value)  # type: ignore[arg-type]
    return PlanBudget(setting="keep", value="auto")
