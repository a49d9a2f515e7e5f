"""Routes of `/v1/messages`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.anthropic.messages import CountTokensRequest, MessagesRequest, MessageWriter, as_chat
from server.http.bodies import BodyRoute
from server.openai.preparing import chat_prompt, check_model
from server.openai.translating import answer_translated, checked, endpoint_names
from server.state import Server


def build_router(server: Server) -> APIRouter:
    """Build the routes."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/messages")
    async def create_message(http: Request, body: MessagesRequest) -> Response:
        """Answer a conversation in the format of Anthropic's Messages API; nothing is stored."""
        server.unknown_fields.check(body)
        body.model = check_model(server, body.model)
        return await answer_translated(http, server, body, as_chat, MessageWriter, _params(body))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Return the number of tokens of a conversation's prompt."""
        server.unknown_fields.check(body)
        with endpoint_names(_params(body)):
            prompt, _ = await chat_prompt(server, checked(as_chat, body))
        return {"input_tokens": len(prompt)}

    return router


def _params(body: CountTokensRequest) -> dict[str, str]:
    """Return Anthropic's names for chat's fields."""
    has_effort = body.output_config is not None and body.output_config.effort is not None
    effort = "output_config.effort" if has_effort else "thinking"
    return {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": effort,
        "thinking_token_budget": "thinking.budget_tokens",
    }
