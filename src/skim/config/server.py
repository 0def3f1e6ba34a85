"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from skim.config.declare import Checked, Limits, parse_bytes
from skim.errors import ConfigError, shown
from skim.registry import reasoning_parser_help, tool_parser_help

Positive = Annotated[int, Limits(at_least=1)]
Seconds = Annotated[float, Limits(above=0)]
Secret = Annotated[str | None, Limits(secret=True)]
Size = Annotated[str | int, Limits(check=parse_bytes)]


def check_origins(name: str, value: object) -> None:
    """Raise a ConfigError unless `value` is a list of origins: `https://app.example`, `null` or `*`."""
    for origin in [each.strip() for each in value.split(",")] if isinstance(value, str) else [""]:
        parts = urlsplit(origin)
        web = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and origin == f"{parts.scheme}://{parts.netloc}"
        )
        if origin not in ("*", "null") and not (web and "@" not in parts.netloc):
            raise ConfigError(
                f"{name} must be origins such as 'https://app.example', separated by commas, or '*', "
                f"got {shown(value)}",
                fields=name,
            )


@dataclass(frozen=True)
class ServerConfig(Checked):
    """Address, keys and limits of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only."""
    port: Annotated[int, Limits(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes any free one."""
    served_model_name: str | None = None
    """Model name in the API. Default: the model as it was given, or the last part of a path."""
    api_key: Secret = None
    """Key that every route but `/health`, `/` and `/docs` requires, as `Authorization: Bearer KEY`. Routes
    under `/admin` require `admin_key` instead. Default: no key."""
    admin_key: Secret = None
    """Key for the routes under `/admin`, which are off without one."""
    allowed_hosts: str | None = None
    """Names, separated by commas, that the Host and Origin of a request may have besides loopback names; `*`
    allows all. Default: a server without a key on a loopback address allows loopback names only, any other
    server all."""
    allow_origin: Annotated[str | None, Limits(check=check_origins)] = None
    """Origins of web pages, separated by commas, that may call this server from a browser (CORS), such as
    `https://app.example` or `http://localhost:3000`; `*` allows all. Default: none."""
    max_queued_requests: Annotated[int, Limits(at_least=0)] = 256
    """Sequences that may wait beyond `max_num_seqs`; a request over this limit is answered 429."""
    max_queued_tokens: Annotated[int | None, Limits(at_least=1)] = None
    """Prompt tokens of requests that wait for their first token; a request over this limit is answered 429,
    unless it is the only one. Requests of up to a 64th of it have the same limit of their own. Default: 16
    context windows, at least 1,048,576."""
    max_queued_text: Size = "64M"
    """Most bytes of requests that wait to be parsed and tokenized; a request over this limit is answered 429.
    Requests of up to 64 KB have the same limit of their own."""
    request_timeout: Seconds = 600.0
    """Seconds a request may take before it is aborted with 408."""
    keepalive: Annotated[float, Limits(at_least=0)] = 5.0
    """Seconds of silence after which a stream sends a comment with its progress; 0 turns this off."""
    drain_timeout: Annotated[float, Limits(at_least=0)] = 30.0
    """Seconds that running requests have to finish after SIGTERM; 0 aborts them at once."""
    step_timeout: Seconds = 300.0
    """Seconds an engine step may take before `/health` reports the engine as stalled and new requests get a
    503."""
    max_body_size: Size = "16M"
    """Largest request body."""
    max_body_memory: Size = "256M"
    """Memory for all bodies of over 64 KB that are being received; one that finds no room is answered 503."""
    body_timeout: Seconds = 60.0
    """Seconds in which a body must arrive."""
    max_header_size: Size = "64K"
    """Largest request head: the URL and all headers. A larger one is answered 431."""
    header_timeout: Seconds = 10.0
    """Seconds in which a request head must arrive, from the connection or its first byte."""
    max_connections: Positive = 1024
    """Most open connections. A new one then replaces the one that has been waited for longest. Lower if the
    limit of open files (`ulimit -n`, raised to its hard limit) leaves no room."""
    max_body_values: Positive = 1_000_000
    """Most values in a request body: list items and fields. An object counts as 16."""
    max_n: Positive = 16
    """Largest `n` and `best_of` of a request."""
    max_prompts: Positive = 256
    """Most prompts in one completion request."""
    max_prompt_logprobs: Positive = 500_000
    """Most log-probabilities of prompt tokens in one reply: tokens times alternatives, the token included."""
    max_stop_strings: Positive = 16
    """Most stop strings, and most stop token ids, of a request."""
    max_stop_length: Positive = 256
    """Longest stop string or bad word, in characters."""
    max_logit_bias: Positive = 1024
    """Most entries of `logit_bias`, `allowed_token_ids` and `bad_words`."""
    max_stored_responses: Annotated[int, Limits(at_least=0)] = 1024
    """Responses of `/v1/responses` that are kept in memory for `previous_response_id`; 0 stores none. The
    least recently used are forgotten first."""
    max_stored_bytes: Size = "64M"
    """Memory for stored responses. Each counts with its whole conversation."""
    max_documents: Positive = 2048
    """Most documents of a rerank request, and most texts of an embeddings request."""
    max_embedding_tokens: Positive = 8192
    """Longest text of an embeddings request, in tokens, within the context window. One text at a time takes
    memory beside the KV pool, for its keys and values."""
    max_rerank_tokens: Positive = 131_072
    """Most tokens of a rerank request: the query and all documents together."""
    max_schema_size: Size = "64K"
    """Largest JSON schema in a request, tool parameters included."""
    control_tokens: Annotated[str, Limits(choices=("text", "parse"))] = "text"
    """Control tokens of the chat template inside messages and tools: `text` encodes them as text, `parse` as
    control tokens. A request may choose."""
    tool_parser: Annotated[str, Limits(choices=tool_parser_help)] = "auto"
    """Format of the model's tool calls; `auto` chooses by the chat template."""
    reasoning_parser: Annotated[str, Limits(choices=reasoning_parser_help)] = "auto"
    """Format of the model's reasoning; `auto` chooses by the chat template, `none` leaves it as content."""
    log_level: Annotated[str, Limits(choices=("debug", "info", "warning", "error"))] = "info"
    """Least severe log line that is shown: `debug`, `info`, `warning` or `error`."""
    log_format: Annotated[str, Limits(choices=("auto", "text", "json"))] = "auto"
    """Log lines: `text` for people, `json` for programs, `auto` (text on a terminal, JSON otherwise)."""
