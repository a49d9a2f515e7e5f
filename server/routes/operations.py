"""Routes that do not generate: health, models, metrics, version, tokens."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.api import EngineStopped, RequestError
from server.http.bodies import BodyRoute
from server.http.error_responses import error_response
from server.openai.preparing import check_model, template_variables
from server.openai.sampling_fields import given_or
from server.state import Server
from server.text.attachments import replace_attachments
from server.text.call_formats import call_marks
from server.text.tools import functions_of, template_message
from server.version import COMMIT, VERSION
from server.wire.answers import raw_list
from server.wire.fields import DetokenizeRequest, TokenizeRequest
from server.wire.unsupported_fields import refuse_unsupported

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_router(server: Server) -> APIRouter:
    """Build these routes, at the root and under /v1."""
    router = APIRouter(route_class=BodyRoute)
    _add_state(router, server)
    _add_models(router, server)
    _add_tokens(router, server)
    return router


def _add_state(router: APIRouter, server: Server) -> None:
    client = server.client

    def with_sleep(status: str) -> dict[str, str]:
        """Return the body of a probe, which names the state of an engine that is not awake."""
        if client.is_awake:
            return {"status": status}
        return {"status": status, "engine": client.state.value}

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """Return 200 while the engine loads, sleeps or completes its steps, else 503."""
        if client.is_stalled:
            return error_response(EngineStopped("the engine completes no more steps; restart the daemon"))
        if client.is_alive:
            return JSONResponse(with_sleep("ok"))
        return error_response(EngineStopped("the engine has stopped"))

    @router.get("/ready")
    async def ready() -> Response:
        """Return 200 if requests are served (also if the engine must wake for them), else 503."""
        if client.is_ready:
            return JSONResponse(with_sleep("ready"))
        state = "draining" if client.is_draining else client.loading
        return error_response(EngineStopped(f"not ready: {state}"))

    @router.get("/version")
    async def version() -> dict[str, str | None]:
        """Return the daemon's version, and the commit that its image was built from."""
        return {"version": VERSION, "commit": COMMIT}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the numbers of open, running and waiting requests."""
        stats = client.last_stats
        if client.num_held is not None or stats is None:
            return {"server_load": client.num_open, "running": 0, "waiting": client.num_held or 0}
        return {
            "server_load": client.num_open,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        is_healthy = client.is_alive and not client.is_stalled
        return Response(server.metrics.render(is_healthy, client.num_held), media_type=_METRICS_TYPE)


def _add_models(router: APIRouter, server: Server) -> None:
    client = server.client
    started = int(time.time())

    def model_card(name: str) -> dict[str, Any]:
        _, adapter = server.settings.adapter()
        base = server.settings.model or name
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "polydraft",
            "root": adapter or base,
            "parent": base if adapter else None,
            "max_model_len": client.ready_facts().max_model_len,
            "thinking": server.dialogue.thinking.card() if server.dialogue.thinking else None,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the served model, under each of its names."""
        return {"object": "list", "data": [model_card(name) for name in server.settings.served_names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return one model by name."""
        check_model(server, name)
        return model_card(name)


def _add_tokens(router: APIRouter, server: Server) -> None:
    client = server.client
    tokenizer = server.tokenizer

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a prompt or of a conversation."""
        check_model(server, body.model)
        server.unknown_fields.check(body)
        refuse_unsupported(body)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await tokenizer.run_encode(body.prompt, body.add_special_tokens)
        else:
            conversation = body.messages or []
            shows_placeholders = given_or(body.attachment_placeholders, server.settings.attachment_placeholders)
            replace_attachments(conversation, shows_placeholders)
            messages = [template_message(message, number) for number, message in enumerate(conversation)]
            tools = [tool.model_dump(exclude_none=True) for tool in functions_of(body.tools)]
            tokens = await tokenizer.run_chat(
                messages,
                body.add_generation_prompt,
                body.continue_final_message,
                template_variables(body.chat_template_kwargs),
                tools,
                (),
                call_marks(server.dialogue.call_format),
            )
        length = client.facts.max_model_len if client.facts else None
        content = await tokenizer.run(tokens_as_json, tokens, length, body.return_token_strs, size=len(tokens))
        return Response(content, media_type="application/json")

    def tokens_as_json(tokens: list[int], length: int | None, with_texts: bool) -> bytes:
        texts = None
        if with_texts:
            texts = raw_list(tokenizer.token_text(token) for token in tokens)
        answer = {
            "count": len(tokens),
            "max_model_len": length,
            "tokens": raw_list(tokens),
            "token_strs": texts,
        }
        return msgspec.json.encode(answer)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return a description of the tokenizer."""
        return tokenizer.describe()

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Return the text of token ids."""
        check_model(server, body.model)
        server.unknown_fields.check(body)
        return {"prompt": await tokenizer.run(text_of, body.tokens, size=len(body.tokens))}

    def text_of(tokens: list[int]) -> str:
        size = tokenizer.vocab_size
        if bad := [token for token in tokens if not 0 <= token < size]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {size}", "tokens")
        return tokenizer.decode(tokens)
