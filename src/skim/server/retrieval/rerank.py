"""`/v1/rerank`: ranks documents for a query, with the scorers of sparse prefill."""

from __future__ import annotations

from functools import partial

from skim.llm import LLM
from skim.prefill.rank import ranking_of
from skim.server.endpoint import Call
from skim.server.errors import ApiError
from skim.server.reply import Reply, json_reply
from skim.server.retrieval.replies import RankedDocument, RankedText, RankReport, RankUsage, RerankResponse
from skim.server.retrieval.requests import RankOptions, RerankRequest
from skim.server.tasks import Task, Work


async def post_rerank(call: Call) -> Reply:
    service, request = call.service, call.body
    llm, most = service.llm, service.config.max_rerank_tokens
    service.check_model(request.model)
    texts = [one if isinstance(one, str) else one.text for one in request.documents]
    options = request.skim or RankOptions()
    scorer = options.scorer or llm.config.prefill.scorer
    # A token has a limited number of characters, so this is checked before the slow work of encoding.
    if request.max_tokens_per_doc is None and sum(map(len, texts)) > most * service.texts.longest:
        raise _too_long(f"far more than {most}", most)

    def make() -> Work[list[float]]:
        ranking = ranking_of(
            partial(llm.encode, add_special_tokens=False),
            first_token(llm),
            request.query,
            texts,
            scorer=scorer,
            block_size=llm.config.prefill.prefill_block_size,
            scoring_budget=options.scoring_budget or 1.0,
            most_per_document=request.max_tokens_per_doc,
        )
        if ranking.tokens > most:
            raise _too_long(str(ranking.tokens), most)
        return Work(ranking.tokens, partial(llm.engine.rank, ranking))

    task = Task[list[float]](service, call.log)
    relevances = await task.run("rank", make)
    call.log.fields.update(documents=len(texts), scorer=scorer)
    reply = RerankResponse(
        id=f"rerank-{call.log.id}",
        model=service.model_name,
        results=best_of(request, texts, relevances),
        usage=RankUsage(prompt_tokens=task.tokens, total_tokens=task.tokens),
        skim=RankReport(scorer=scorer),
    )
    return json_reply(reply)


def best_of(request: RerankRequest, texts: list[str], relevances: list[float]) -> list[RankedDocument]:
    """The results, the best first; equal ones in the request's order."""
    order = sorted(range(len(texts)), key=lambda index: (-relevances[index], index))[: request.top_n]
    shown = request.return_documents is not False
    return [
        RankedDocument(
            index=index,
            relevance_score=relevances[index],
            document=RankedText(text=texts[index]) if shown else None,
        )
        for index in order
    ]


def first_token(llm: LLM) -> int | None:
    """The token that begins texts. Models rest their attention on it."""
    begin: int | None = llm.tokenizer.bos_token_id
    return begin if begin is not None else min(llm.engine.model.eos_token_ids, default=None)


def _too_long(tokens: str, most: int) -> ApiError:
    return ApiError(
        400,
        f"the query and documents have {tokens} tokens, and this server ranks at most {most} at once; send "
        "fewer or shorter documents, set max_tokens_per_doc, or raise the server's --max-rerank-tokens",
        param="documents",
        code="context_length_exceeded",
        reason="too_long",
    )
