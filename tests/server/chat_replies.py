"""One chat reply, whole and as the chunks of a stream: what other protocols are translated from."""

from __future__ import annotations

from typing import Any

from skim.server.protocol.replies import ChatResponse, SkimReport

HEAD = {"id": "c", "created": 1, "model": "m"}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 2},
}
REPORT = SkimReport(
    prompt_tokens=9,
    kept_tokens=9,
    cached_tokens=2,
    restored_tokens=0,
    generated_tokens=4,
    preemptions=0,
    queue_ms=0.0,
    scoring_ms=0.0,
    prefill_ms=0.0,
    decode_ms=0.0,
    scorer=None,
    fallback=None,
    follow_up=None,
    kv_format="float32",
    kv_bytes=13 * 8,
)


def reply_of(text: str, thought: str, calls: list[str], finish: str, stop: str | None) -> ChatResponse:
    made = [
        {"id": f"t{i}", "function": {"name": "look", "arguments": arguments}}
        for i, arguments in enumerate(calls)
    ]
    message: dict[str, Any] = {"content": text or None, "tool_calls": made or None}
    if thought:
        message["reasoning_content"] = thought
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    return ChatResponse.model_validate(
        {**HEAD, "choices": [choice], "usage": USAGE, "skim": REPORT.model_dump()}
    )


def chunks_of(
    text: str,
    thought: str,
    calls: list[str],
    finish: str,
    stop: str | None,
    cut: int,
    logprobs: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The chunks of the same reply, its texts in pieces of `cut` characters, each with these logprobs."""

    def pieces(whole: str) -> list[str]:
        return [whole[at : at + cut] for at in range(0, len(whole), cut)]

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(thought)]
    deltas += [{"content": piece} for piece in pieces(text)]
    for index, arguments in enumerate(calls):
        first, *rest = pieces(arguments) or [""]
        function = {"name": "look", "arguments": first}
        deltas.append({"tool_calls": [{"index": index, "id": f"t{index}", "function": function}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in rest]
    shown = {"logprobs": {"content": logprobs}} if logprobs is not None else {}
    found = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None, **shown}]} for delta in deltas]
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop}
    return [*found, {"choices": [last]}, {"choices": [], "usage": USAGE, "skim": REPORT.model_dump()}]
