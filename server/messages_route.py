"""The routes of `/v1/messages`: an answer, whole or as server-sent events, and a prompt's tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.api import RequestError
from server.answering import answer_told
from server.messages import CountTokensRequest, MessagesRequest, Messenger, as_chat
from server.preparing import chat_prompt, prepare_chat
from server.responses_route import checked, in_own_words
from server.state import Server

_PARAMS = {"stop": "stop_sequences", "reasoning_effort": "thinking"}


def build_router(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def create_message(http: Request, body: MessagesRequest) -> Response:
        """Answer a conversation, in the shape of Anthropic's Messages API; nothing is stored."""
        server.unknown_fields.check(body)
        try:
            generation = await prepare_chat(server, checked(as_chat, body))
        except RequestError as error:
            raise in_own_words(error, _PARAMS) from error
        is_detailed = server.settings.per_request_spec_decode_metrics == "detailed"
        messenger = Messenger(body, generation, is_detailed if body.metrics is None else body.metrics)
        return await answer_told(http, server, generation, messenger, body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """How many tokens the prompt of such a conversation has."""
        server.unknown_fields.check(body)
        try:
            prompt, _ = await chat_prompt(server, checked(as_chat, body))
        except RequestError as error:
            raise in_own_words(error, _PARAMS) from error
        return {"input_tokens": len(prompt)}

    return router
