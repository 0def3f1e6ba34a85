"""A server's life: listen, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from skim.config import EngineConfig, ServerConfig, parse_bytes
from skim.engine.start import settle_heap
from skim.errors import ConfigError
from skim.llm import LLM
from skim.memory.budget import in_words
from skim.models.load import LoadedModel, check_device, pick_device
from skim.server import logs
from skim.server.front import Front
from skim.server.openapi import describe
from skim.server.origin import with_cors
from skim.server.routes import ENDPOINTS, router
from skim.server.service import Service
from skim.server.wire import ACCEPTS, AcceptErrors, Crowd, Wire, most_connections, raise_file_limit

log = logging.getLogger(__name__)

LOADER = "skim-server-load"
BACKLOG = 2048  # connections that the kernel keeps until they are accepted
SHUTDOWN_GRACE_SECONDS = 5  # to send the error to replies that the drain timeout cut off
CLOSE_SECONDS = 3  # for the engine's present step to end
THREAD_SECONDS = 0.5  # for other threads to end
LAST_RESORT_SECONDS = 9.5  # after the drain timeout, the process ends whatever happens


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code. Errors at start are raised."""
    logs.configure(config.log_level, config.log_format)
    check_device(engine_config.model)  # before anything listens
    with listen(config.host, config.port) as listener:
        code = asyncio.run(_serve(engine_config, config, listener))
    faulthandler.cancel_dump_traceback_later()
    if busy := _threads_left():
        log.warning("exiting while threads still run: %s", ", ".join(busy))
        logging.shutdown()
        os._exit(code)  # the interpreter would wait for them, and torch crashes if it shuts down under them
    return code


def _threads_left() -> list[str]:
    """Names of our threads that do not end: one that loads, a step that hangs, a long text."""
    until = time.monotonic() + THREAD_SECONDS
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("skim-")]
    for thread in ours:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in ours if thread.is_alive()]


def application(service: Service) -> ASGIApp:
    """The ASGI application for a service."""
    document = describe(ENDPOINTS, service.config, service.model_name)
    front = Front(router(service, document), service.config, service.metrics)
    return with_cors(front, service.config)


def facts_of(llm: LLM) -> dict[str, Any]:
    """The loaded model's dtype, device, context window, KV pool and skimming, for the log."""
    core = llm.engine.core
    return {
        "dtype": str(core.model.dtype).removeprefix("torch."),
        "device": str(core.model.device),
        "weight_bytes": core.model.weights.bytes,
        "weight_bits": round(core.model.weights.bits, 2),
        "max_model_len": core.max_model_len,
        "kv_pool_bytes": core.memory.pool.capacity * core.memory.pool.block_bytes,
        "kv_pool_tokens": core.memory.pool.tokens_at(core.max_model_len),
        "kv_format": core.memory.pool.format_name,
        "sparse_prefill": llm.config.prefill.sparse_prefill,
        "scorer": llm.config.prefill.scorer,
        "slow_fast": llm.config.decode.slow_fast,
        "slow_fast_layers": len(core.memory.pool.summarized),
        "residency": core.residency.policy,
        "idle_park": llm.config.residency.idle_park,
        **_drafter_facts(llm.engine.drafter),
    }


def _drafter_facts(drafter: LoadedModel | None) -> dict[str, Any]:
    if drafter is None:
        return {}
    weights = drafter.weights
    return {
        "drafter": drafter.name,
        "drafter_bytes": weights.bytes,
        "drafter_bits": round(weights.bits, 2),
    }


def ready_in_words(model: str, address: str, facts: Mapping[str, Any]) -> str:
    """`ready: smollm2-135m on http://127.0.0.1:8000 (float32 on cpu, ...)`."""
    skims = facts["sparse_prefill"]
    skimming = "skimming off" if skims == "off" else f"skimming {skims} by {facts['scorer']}"
    slow_fast = "" if facts["slow_fast"] == "off" else f", slow-fast decode {facts['slow_fast']}"
    if slow_fast and not facts["slow_fast_layers"]:
        slow_fast += " without effect: every layer has a sliding window"
    drafter = ""
    if "drafter" in facts:
        size = in_words(facts["drafter_bytes"])
        drafter = f", drafter {facts['drafter']} of {size} in {facts['drafter_bits']:.1f} bits"
    residency = "" if facts["residency"] == "both" else f", residency {facts['residency']}"
    if facts["idle_park"]:
        residency += f", parked after {facts['idle_park']:g} s without work"
    return (
        f"ready: {model} on {address} ({facts['dtype']} on {facts['device']}, weights of "
        f"{facts['weight_bytes'] / 2**30:.1f} GiB in {facts['weight_bits']:.1f} bits, context window "
        f"{facts['max_model_len']:,} tokens, KV pool {facts['kv_pool_bytes'] / 2**30:.1f} GiB for "
        f"{facts['kv_pool_tokens']:,} tokens in {facts['kv_format']}, {skimming}{drafter}{slow_fast}"
        f"{residency})"
    )


def served_name(engine_config: EngineConfig, config: ServerConfig) -> str:
    """The model's name for clients: `served_model_name`, the model as given, or the last part of its path."""
    given = engine_config.model.model
    is_path = PurePath(given).is_absolute() or given.startswith(".") or given.endswith(".gguf")
    return config.served_model_name or (PurePath(given).name if is_path else given)


def listen(host: str, port: int) -> socket.socket:
    """Bind the port. Called before loading, so that a port in use is reported at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another `port` or "
            "`host`",
            fields=("host", "port"),
        ) from error


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)  # uvicorn's backlog is also the number of connections accepted at once


def http_server(service: Service, files: int) -> uvicorn.Server:
    """The HTTP server of a service, in a process that may open this many files."""
    config = service.config
    crowd = Crowd(
        max_connections=most_connections(config.max_connections, files),
        max_header_size=parse_bytes("max_header_size", config.max_header_size),
        header_timeout=config.header_timeout,
        count=service.metrics.failed,
    )
    if crowd.max_connections < config.max_connections:
        log.warning(
            "at most %d connections instead of %d: %d files may be open; raise `ulimit -n`",
            crowd.max_connections,
            config.max_connections,
            files,
        )
    settings = uvicorn.Config(
        application(service),
        http=partial(Wire, crowd),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=ACCEPTS,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
    )
    return _Uvicorn(settings)


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    service = Service(config, served_name(engine_config, config))
    server = http_server(service, raise_file_limit())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("%s again: aborting the requests that still run", number.name)
            service.cut_off()
            return
        stop.set()
        log.info("%s: draining, no new requests are accepted", number.name)
        end_process_after(config.drain_timeout + LAST_RESORT_SECONDS)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    loading = load_in_thread(engine_config)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d, loading %s", host, port, service.model_name)
    stopping = asyncio.create_task(stop.wait())
    try:
        begun: set[asyncio.Future[Any]] = {loading, stopping, http}
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.ready(loading.result())
            address = f"http://{host}:{port}"
            facts = facts_of(loading.result())
            told = ready_in_words(service.model_name, address, facts)
            log.info(told, extra={"fields": {"model": service.model_name, **facts}, "told": True})
            await asyncio.wait(begun - {loading}, return_when=asyncio.FIRST_COMPLETED)
        if await service.drain():
            log.info("drained: every accepted request was answered")
        else:
            log.warning("some requests were aborted; --drain-timeout is %g s", config.drain_timeout)
    finally:
        stopping.cancel()
        # Retrieve the exception, or asyncio logs that it was never retrieved.
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        server.should_exit = True
        await asyncio.gather(http, return_exceptions=True)
        stuck = service.close(CLOSE_SECONDS)
    if stuck is None:
        return 0
    log.error("the engine's step did not end within %d s; it is abandoned at:\n%s", CLOSE_SECONDS, stuck)
    return 1


def end_process_after(seconds: float) -> None:
    """Print the stacks of all threads after this time and end the process, even if no Python code can run.

    Does nothing if stderr is closed or the time is too long for a timer.
    """
    with contextlib.suppress(RuntimeError, OverflowError, ValueError):
        faulthandler.dump_traceback_later(seconds, exit=True)


def load_in_thread(config: EngineConfig) -> asyncio.Future[LLM]:
    """Load the model in a daemon thread, so that a stop signal can end the server during loading."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LLM] = loop.create_future()

    def resolve(llm: LLM | None, error: Exception | None) -> None:
        if loaded.done():
            return
        if llm is not None:
            loaded.set_result(llm)
        elif error is not None:
            loaded.set_exception(error)

    def load() -> None:
        llm, error = None, None
        try:
            on_gpu = pick_device(config.model.device).type == "cuda"
            served = replace(config, scheduler=config.scheduler.for_serving(on_gpu))
            llm = LLM.from_config(served)
            settle_heap()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(resolve, llm, error)

    threading.Thread(target=load, name=LOADER, daemon=True).start()
    return loaded
