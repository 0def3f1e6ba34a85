"""Replies of `/v1/responses` in OpenAI's shapes, made from a chat reply. Pure functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from skim.server.protocol.replies import ChatLogprob, ChatResponse, SkimReport, Usage
from skim.server.responses.requests import ResponsesRequest, Status


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputThought(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = []
    content: list[OutputThought]


OutputItem = Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """A response. The fields after `output` repeat those of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: str
    metadata: dict[str, str]
    user: str | None
    background: Literal[False] = False
    skim: SkimReport | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def new_response(
    request: ResponsesRequest, response_id: str, model: str, created_at: int, *, store: bool
) -> ResponseObject:
    """A response without output, in progress. JSON has no infinite numbers, so those become null."""
    choice = request.tool_choice or "auto"
    asked = request.text
    text = asked.model_dump(mode="json", exclude_none=True, by_alias=True) if asked is not None else {}
    reasoning = request.reasoning.model_dump() if request.reasoning is not None else {}
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        model=model,
        status="in_progress",
        output=[],
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        store=store,
        max_output_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=[tool.model_dump(mode="json") for tool in request.tools or ()],
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text={"format": {"type": "text"}, **text},
        reasoning=reasoning,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
        user=request.user,
    )


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an output item: `msg_`, `fc_` or `rs_`, then the response's own id and the index."""
    return f"{kind}_{response_id.removeprefix('resp_')}{index:02}"


def response_of(item: str) -> str:
    """The id of the response that an output item's id belongs to."""
    return f"resp_{item.partition('_')[2][:-2]}"


def output_of(reply: ChatResponse, response_id: str) -> list[OutputItem]:
    """The output items of a chat reply: reasoning, then the text, then calls."""
    [choice] = reply.choices
    message = choice.message
    ended: Status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[OutputMessage | OutputCall | OutputReasoning] = []

    def new_id(kind: str) -> str:
        return item_id(kind, response_id, len(items))

    if thought := message.reasoning_content:
        content = [OutputThought(text=thought)]
        items.append(OutputReasoning(id=new_id("rs"), status="completed", content=content))
    if message.content or not (items or message.tool_calls):
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        text = OutputText(text=message.content or "", logprobs=logprobs)
        items.append(OutputMessage(id=new_id("msg"), status="completed", content=[text]))
    for call in message.tool_calls or ():
        called = call.function
        items.append(
            OutputCall(
                id=new_id("fc"),
                status="completed",
                call_id=call.id,
                name=called.name,
                arguments=called.arguments,
            )
        )
    items[-1].status = ended
    return items


def finished(
    response: ResponseObject,
    output: list[OutputItem],
    finish_reason: str | None,
    usage: Usage,
    skim: SkimReport,
) -> ResponseObject:
    """The response with its output, complete or cut off by `max_output_tokens`."""
    cut = finish_reason == "length"
    update = {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": IncompleteDetails(reason="max_output_tokens") if cut else None,
        "output": output,
        "usage": usage_of(usage),
        "skim": skim,
    }
    return response.model_copy(update=update)


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(
            reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )
