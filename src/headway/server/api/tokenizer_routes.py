"""The HTTP endpoints of the tokenizer: a text or a chat to tokens, and tokens to text.

Both take a place among those that wait for the tokenizer, as requests that generate do.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from headway.server.api.requests import DetokenizeRequest, TokenizeRequest
from headway.server.api.response_models import DetokenizeResponse, TokenizeResponse
from headway.server.http.asgi_io import record_of, send_json, until_disconnect
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services


class Tokenize:
    """POST /tokenize."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, record_of(scope), send))

    async def _answer(self, body: bytes, record: AccessRecord, send: Send) -> None:
        services = self._services
        request = await services.bodies.parse(body, TokenizeRequest)
        if request.prompt is not None:
            services.prompts.check_text(request.prompt, services.info)
        with services.reserve_tokenizer(body_bytes=len(body), key=record.key):
            await self._tokenize(request, send)

    async def _tokenize(self, request: TokenizeRequest, send: Send) -> None:
        services = self._services
        services.check_model(request.model)
        request.check_supported()
        info = services.info
        if request.messages is not None:
            prompt = await services.prompts.from_messages(
                request.messages,
                info,
                tools=[definition.as_tool() for definition in request.tools or ()],
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                template_options=request.chat_template_kwargs,
            )
            tokens = prompt.token_ids
        else:
            special = request.add_special_tokens is not False
            tokens = await services.prompts.tokenize(request.prompt or "", info, add_special_tokens=special)
        pieces = await services.prompts.pieces(tokens) if request.return_token_strs else None
        await send_json(send, TokenizeResponse(tokens, len(tokens), info.max_model_len, pieces))


class Detokenize:
    """POST /detokenize."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, record_of(scope), send))

    async def _answer(self, body: bytes, record: AccessRecord, send: Send) -> None:
        services = self._services
        request = await services.bodies.parse(body, DetokenizeRequest)
        services.prompts.check_number(request.tokens, services.info)
        with services.reserve_tokenizer(body_bytes=len(body), key=record.key):
            services.check_model(request.model)
            text = await services.prompts.decode(request.tokens, services.info)
        await send_json(send, DetokenizeResponse(text))
