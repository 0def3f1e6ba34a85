"""From a request to its sequences: refused if it can never be served, else with room for its reply.

Knows nothing of the schedule. `admission.py` has the checks by plain numbers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from functools import lru_cache, partial

from skim.config import EngineConfig
from skim.engine.admission import check_request, check_support, room_for_reply
from skim.engine.sequence import Event, RequestState, Sequence
from skim.engine.slots import Slots
from skim.engine.slow_fast import SlowFast
from skim.memory.pool import KVPool
from skim.models.load import LoadedModel
from skim.prefill.planner import Planner
from skim.prefill.reading import Planned
from skim.prefill.request import Request
from skim.sampling.bad_words import encode_words
from skim.sampling.grammar import GrammarCompiler
from skim.sampling.params import SamplingParams
from skim.sampling.stop import Detokenizer, StopChecker, quick_decode


class Intake:
    """Makes the states and sequences of requests.

    `make_sequences` runs on the engine's thread, the other methods on any.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        max_model_len: int,
        pool: KVPool,
        planner: Planner,
        slow_fast: SlowFast,
    ) -> None:
        self._model = model
        self._config = config
        self._max_model_len = max_model_len
        self._pool = pool
        self._planner = planner
        self._slow_fast = slow_fast
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self._decoder = lru_cache(maxsize=16)(partial(quick_decode, model.tokenizer))
        self._orders = itertools.count()

    def open(self, request_id: int, request: Request, emit: Callable[[Event], None]) -> RequestState:
        """Refuse a request that can never be served, compile its grammar, and return its state."""
        check_request(
            request,
            vocab_size=self._model.vocab_size,
            max_sequences=self._config.scheduler.max_num_seqs,
        )
        check_support(
            request,
            self._model.module,
            self._config.prefill.drafter,
            summarized=bool(self._pool.summarized),
            on_gpu=self._pool.device.type == "cuda",
        )
        skims = self._planner.wanted(request)
        if not skims:
            count = len(request.prompt_token_ids)
            self.room_for_reply(count, count, request.params, self._planner.refusal(request))
        params = request.params
        bad_words = encode_words(params.bad_words, self._model.tokenizer) if params.bad_words else ()
        matcher = self._grammars.compile(params.grammar) if params.grammar is not None else None
        return RequestState(request_id, request, emit, skims, bad_words, matcher)

    def room_for_reply(
        self,
        slots: int,
        end: int,
        params: SamplingParams,
        unskimmed: str | None = None,
        *,
        whole: bool = False,
    ) -> int:
        """The most tokens that may be generated after the prompt; an error if that is none.

        With `whole`, its blocks behind sliding windows are kept.
        """
        return room_for_reply(
            slots,
            end,
            params,
            window=self._max_model_len,
            widest_window=self._model.max_positions,
            pool_tokens=self._pool.geometry.tokens_in(self._pool.capacity, whole=whole),
            unskimmed=unskimmed,
        )

    def make_sequences(self, state: RequestState, planned: Planned) -> Sequence:
        """Give a planned request its sequences. Returns the first, which computes the prompt for the others.

        Raises RequestError if there is no room for a reply.
        """
        reading, params = planned.reading, state.request.params
        state.max_tokens = self.room_for_reply(
            len(reading.tokens), reading.end, params, planned.problem, whole=Slots(reading).is_late
        )
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        decode = self._decoder(params.skip_special_tokens, tuple(params.shown_special_tokens))
        watched = self._slow_fast.watched(state, len(reading.tokens))
        for index in range(params.n):
            state.sequences.append(
                Sequence(
                    parent=state,
                    index=index,
                    order=next(self._orders),
                    slots=Slots(reading),
                    seed=seed + index,
                    detokenizer=Detokenizer(decode, state.request.prompt_token_ids),
                    stops=StopChecker(params.stop, params.include_stop_str_in_output),
                    watched=watched,
                )
            )
        leader, *followers = state.sequences
        leader.followers = followers
        return leader
