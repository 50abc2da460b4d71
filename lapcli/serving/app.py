"""The routes: OpenAI's completions, chats and models, health and metrics."""

import asyncio
import contextlib
import difflib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as StarletteHTTPException

from lapcli.errors import LapcliError
from lapcli.serving.answers import Answer, ChatForm, CompletionForm, Form, error_document, event
from lapcli.serving.dispatch import Busy, Dispatcher
from lapcli.serving.gate import App, Gate, Refused
from lapcli.serving.jobs import Failed, Job, Piece
from lapcli.serving.keys import ApiKeys
from lapcli.serving.metrics import Registry
from lapcli.serving.policy import ONLY
from lapcli.serving.schema import ChatRequest, CompletionRequest
from lapcli.serving.settings import Limits
from lapcli.serving.texts import Texts, TooLong

_REFERENCE = "#/components/schemas/{model}"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        name: by which clients call the model.
        root: the model as the command line named it.
        created: seconds since 1970.
        max_length: tokens of a request, prompt and answer.
        eos: token ids that end an answer.
        version: of lapcli.
    """

    name: str
    root: str
    created: int
    max_length: int
    eos: frozenset[int]
    version: str


class Wrong(Exception):
    """A request that cannot be answered as it is.

    Args:
        status: of HTTP.
        message: why.
        code: in a word, as OpenAI has it.
        param: the field.
        retry_after: seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after


def _body(model: type[BaseModel]) -> Callable[[Request], Awaitable[Any]]:
    """Reads a request's body as a model: strictly, and as JSON, whose nesting has an end there."""

    async def read(request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page of another site may send everything else without asking.
            raise Wrong(415, f"content-type {kind[:64]!r}: application/json is taken")
        try:
            return model.model_validate_json(await request.body())
        except ValidationError as error:
            raise _complaint(error, model) from error

    return read


def _complaint(error: ValidationError, model: type[BaseModel]) -> Wrong:
    """The first thing that is wrong, without what was sent but for the names of fields."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    # Of a union, the branch that got furthest says most.
    first = max(found, key=lambda each: len(each["loc"])) if found[0]["loc"] else found[0]
    where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))[:128]
    message = first["msg"].removeprefix("Value error, ")[:512]
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where, model.model_fields, 1)
        message = "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
    return Wrong(400, f"{where}: {message}" if where else message, param=where or None)


class Service:
    """Answers requests.

    Args:
        served: what.
        limits: see there.
        dispatcher: where prompts go.
        texts: the tokenizer.
    """

    def __init__(self, served: Served, limits: Limits, dispatcher: Dispatcher, texts: Texts):
        self.served, self.limits, self.dispatcher, self.texts = served, limits, dispatcher, texts

    async def completions(self, request: Request, wanted: CompletionRequest) -> Response:
        """Continue prompts."""
        self._check(wanted)
        self.dispatcher.check(request.state.client)
        prompts = wanted.prompts()
        if not 0 < len(prompts) <= self.limits.prompts:
            raise Wrong(400, f"{len(prompts)} prompts: 1 to {self.limits.prompts}", param="prompt")
        most = 16 if wanted.max_tokens is None else wanted.max_tokens
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        tokens = (
            await self._read(self.texts.encode(texts), "prompt")
            if texts
            else [list(map(int, prompt)) for prompt in prompts]
        )
        for prompt in tokens:
            self._check_prompt(prompt, most, "max_tokens" if wanted.max_tokens is not None else None)
        name = f"cmpl-{request.state.id}"
        follows = wanted.stream_options is not None and wanted.stream_options.include_usage
        form = CompletionForm(name, self.served.name, self.texts, wanted.logprobs is not None, follows)
        return await self._answer(request, wanted, form, tokens, [most] * len(tokens))

    async def chat(self, request: Request, wanted: ChatRequest) -> Response:
        """Answer a chat."""
        self._check(wanted)
        self.dispatcher.check(request.state.client)
        if len(wanted.messages) > self.limits.messages:
            raise Wrong(400, f"{len(wanted.messages)} messages: at most {self.limits.messages}", param="messages")
        tokens = await self._read(self.texts.encode_chat([message.plain() for message in wanted.messages]), "messages")
        most = wanted.most_tokens
        self._check_prompt(tokens, 1 if most is None else most, None if most is None else "max_tokens")
        most = self.served.max_length - len(tokens) if most is None else most
        name = f"chatcmpl-{request.state.id}"
        follows = wanted.stream_options is not None and wanted.stream_options.include_usage
        form = ChatForm(name, self.served.name, self.texts, bool(wanted.logprobs), follows)
        return await self._answer(request, wanted, form, [tokens], [most])

    async def _read(self, tokens: Awaitable[_Result], field: str) -> _Result:
        """The tokens of texts; who ends the server waits for them as for answers."""
        try:
            with self.dispatcher.arriving():
                return await tokens
        except TooLong as error:
            length = self.served.max_length
            raise Wrong(
                400,
                f"{field}: {error}; prompt and answer together have {length} at most",
                code="context_length_exceeded",
                param=field,
            ) from error

    def _check(self, wanted: CompletionRequest | ChatRequest) -> None:
        """Refuse what is beyond the limits."""
        limits, served = self.limits, self.served
        if wanted.model not in (None, served.name):
            raise Wrong(
                404,
                f"there is no model {wanted.model!r} here; {served.name!r} is",
                code="model_not_found",
                param="model",
            )
        if len(wanted.stops) > limits.stops or any(len(text) > limits.stop_characters for text in wanted.stops):
            raise Wrong(
                400, f"stop: at most {limits.stops} texts of at most {limits.stop_characters} characters", param="stop"
            )
        if "" in wanted.stops:
            raise Wrong(400, "stop: an empty text would end every answer before it begins", param="stop")
        if wanted.scores is not None and wanted.scores > limits.logprobs:
            raise Wrong(400, f"log-probabilities of {limits.logprobs} tokens at most", param="logprobs")

    def _check_prompt(self, tokens: Sequence[int], most: int, field: str | None) -> None:
        """Refuse a prompt that the model cannot take."""
        length, vocabulary = self.served.max_length, self.dispatcher.facts["vocabulary"]
        if not tokens:
            raise Wrong(400, "a prompt without a token", param="prompt")
        if max(tokens) >= vocabulary:
            raise Wrong(400, f"token id {max(tokens)}: the model has 0 to {vocabulary - 1}", param="prompt")
        if len(tokens) >= length or (field is not None and len(tokens) + most > length):
            asked = f" and {field} {most}" if field is not None else ""
            raise Wrong(
                400,
                f"the prompt has {len(tokens)} tokens{asked}; prompt and answer together have {length} at most",
                code="context_length_exceeded",
                param=field or "prompt",
            )

    async def _answer(
        self,
        request: Request,
        wanted: CompletionRequest | ChatRequest,
        form: Form,
        prompts: Sequence[list[int]],
        most: Sequence[int],
    ) -> Response:
        """Let the engine do it, and hand it on whole or as it comes."""
        jobs = [
            Job(f"{request.state.id}-{index}", request.state.client, prompt, self._settings(wanted, index, count))
            for index, (prompt, count) in enumerate(zip(prompts, most, strict=True))
        ]
        total = sum(len(prompt) for prompt in prompts)
        request.state.log["prompt_tokens"] = total
        self.dispatcher.submit(jobs)
        if wanted.stream:
            return _Stream(self, jobs, form, total, wanted, request.state.log)
        try:
            answers = await _unless_gone(request.receive, _whole(jobs))
        finally:
            self.finish(jobs, request.state.log)
        if answers is None:
            request.state.log["reason"] = "disconnected"
            # Nobody will read it.
            return Response(status_code=499)
        return JSONResponse(form.whole(answers, total))

    def _settings(self, wanted: CompletionRequest | ChatRequest, index: int, most: int) -> dict[str, Any]:
        """What the engine is told of one prompt."""
        temperature = 1.0 if wanted.temperature is None else wanted.temperature
        # Any draw will do where nobody asks for one.
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed + index
        eos = set() if wanted.ignore_eos else set(self.served.eos)
        return {
            "max_new_tokens": min(most, self.served.max_length),
            "temperature": temperature,
            "top_k": max(0, wanted.top_k or 0),
            "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
            "seed": seed if seed < 2**63 else seed - 2**64,
            "eos": sorted(eos | set(wanted.stop_token_ids or ())),
            "stop": wanted.stops,
            "logprobs": wanted.scores,
        }

    def finish(self, jobs: Sequence[Job], notes: dict[str, Any]) -> None:
        """A request is over, in whatever way: nothing of it stays, and its log line gets to know."""
        for job in jobs:
            self.dispatcher.abandon(job)
        firsts = [job.first - job.begun for job in jobs if job.first is not None]
        notes["tokens"] = sum(job.tokens for job in jobs)
        notes.setdefault("reason", ",".join(dict.fromkeys(job.ended or "" for job in jobs)))
        if firsts:
            notes["first_seconds"] = round(min(firsts), 4)
        # Of a model that comes in one there is nothing to say.
        decisions = {each for job in jobs if (each := job.decision) is not None and each.configuration != ONLY}
        if decisions:
            notes["configuration"] = ",".join(sorted(each.configuration for each in decisions))
            notes["why"] = ",".join(sorted({each.reason for each in decisions}))
        switches = sum(job.switches for job in jobs)
        if switches:
            notes["switches"] = switches
            notes["ended_as"] = ",".join(sorted({job.configuration for job in jobs}))
        if any(job.tries > 1 for job in jobs):
            notes["tries"] = max(job.tries for job in jobs)


async def _whole(jobs: Sequence[Job]) -> list[Answer]:
    """The answers of jobs, when they are whole."""
    answers: list[Answer] = []
    for job in jobs:
        answer = Answer()
        while answer.reason is None:
            piece = await job.pieces.get()
            if isinstance(piece, Failed):
                raise Wrong(piece.status, piece.message)
            if isinstance(piece, Piece):
                answer.add(piece)
            else:
                answer = Answer()
        answers.append(answer)
    return answers


async def _unless_gone(receive: Any, work: Awaitable[_Result]) -> _Result | None:
    """What comes of some work; `None` if the client goes before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Any) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream(Response):
    """An answer as server-sent events."""

    def __init__(
        self,
        service: Service,
        jobs: Sequence[Job],
        form: Form,
        prompt_tokens: int,
        wanted: CompletionRequest | ChatRequest,
        notes: dict[str, Any],
    ):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        # What is streamed has no length.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self.service, self.jobs, self.form, self.notes = service, jobs, form, notes
        self.prompt_tokens = prompt_tokens
        self.counts = wanted.stream_options is not None and wanted.stream_options.include_usage
        self.scored = wanted.scores is not None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        try:
            if await _unless_gone(receive, self._send(send)) is None:
                self.notes["reason"] = "disconnected"
        finally:
            self.service.finish(self.jobs, self.notes)

    async def _send(self, send: Any) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events()) as events:
            async for document in events:
                await send({"type": "http.response.body", "body": document, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True

    async def _events(self) -> AsyncGenerator[bytes]:
        merged: asyncio.Queue[tuple[int, Piece | Failed]] = asyncio.Queue()
        readers = [asyncio.create_task(_read(index, job, merged)) for index, job in enumerate(self.jobs)]
        left = len(self.jobs)
        try:
            for index in range(left):
                opening = self.form.opening(index)
                if opening is not None:
                    yield event(opening)
            while left:
                index, piece = await merged.get()
                if isinstance(piece, Failed):
                    yield event(error_document(piece.status, piece.message, "failed"))
                    return
                answer = Answer()
                answer.add(piece)
                left -= piece.reason is not None
                if answer.text or answer.reason or (self.scored and answer.scores):
                    yield event(self.form.piece(index, answer))
            if self.counts:
                yield event(self.form.usage(self.prompt_tokens, sum(job.tokens for job in self.jobs)))
            yield b"data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()


async def _read(index: int, job: Job, merged: "asyncio.Queue[tuple[int, Piece | Failed]]") -> None:
    """Hand on what comes of a job; what came meanwhile goes in one piece."""
    while True:
        piece = await job.pieces.get()
        if isinstance(piece, Failed):
            merged.put_nowait((index, piece))
            return
        if not isinstance(piece, Piece):
            continue
        # From here on the client may have seen something.
        job.shown = True
        while piece.reason is None and not job.pieces.empty():
            more = job.pieces.get_nowait()
            if not isinstance(more, Piece):
                merged.put_nowait((index, piece))
                if isinstance(more, Failed):
                    merged.put_nowait((index, more))
                return
            piece = Piece(
                piece.tokens + more.tokens, piece.text + more.text, more.reason, [*piece.scores, *more.scores]
            )
        merged.put_nowait((index, piece))
        if piece.reason is not None:
            return


def make_app(service: Service, registry: Registry, keys: ApiKeys) -> App:
    """The application, behind its gate."""
    served, dispatcher = service.served, service.dispatcher
    app = FastAPI(
        title="lapcli serve",
        version=served.version,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, models = models_json_schema(
                [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template=_REFERENCE
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = schema

    def taking(model: type[BaseModel]) -> dict[str, Any]:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
        return {"requestBody": {"required": True, "content": content}}

    @app.post("/v1/completions", openapi_extra=taking(CompletionRequest), response_model=None)
    async def completions(request: Request, wanted: Annotated[Any, Depends(_body(CompletionRequest))]) -> Response:
        """Continue a text or several."""
        return await service.completions(request, wanted)

    @app.post("/v1/chat/completions", openapi_extra=taking(ChatRequest), response_model=None)
    async def chat(request: Request, wanted: Annotated[Any, Depends(_body(ChatRequest))]) -> Response:
        """Answer a chat."""
        return await service.chat(request, wanted)

    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "lapcli",
        "root": served.root,
        "max_model_len": served.max_length,
    }

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        if name != served.name:
            raise Wrong(404, f"there is no model {name[:256]!r} here", code="model_not_found", param="model")
        return card

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether requests are taken and answered."""
        status = "draining" if dispatcher.draining else "ok" if dispatcher.ready else "starting"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(registry.text(), media_type="text/plain; version=0.0.4")

    _answer_errors(app)
    return Gate(app, service.limits, keys, registry)


def _answer_errors(app: FastAPI) -> None:
    """Let every error have OpenAI's form."""

    @app.exception_handler(Wrong)
    async def wrong(_request: Request, error: Wrong) -> Response:
        document = error_document(error.status, error.message, error.code, error.param)
        headers = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSONResponse(document, error.status, headers)

    @app.exception_handler(Busy)
    async def busy(_request: Request, error: Busy) -> Response:
        document = error_document(error.status, error.message, "busy")
        return JSONResponse(document, error.status, {"retry-after": str(error.retry_after)})

    @app.exception_handler(Refused)
    async def refused(_request: Request, error: Refused) -> Response:
        # The rest of a body that nobody reads would be taken for the next request.
        return JSONResponse(error_document(error.status, error.message), error.status, {"connection": "close"})

    @app.exception_handler(LapcliError)
    async def ours(_request: Request, error: LapcliError) -> Response:
        return JSONResponse(error_document(400, str(error)), 400)

    @app.exception_handler(StarletteHTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return JSONResponse(error_document(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, _error: RequestValidationError) -> Response:
        return JSONResponse(error_document(400, "the request is not valid"), 400)

    @app.exception_handler(Exception)
    async def ours_alone(_request: Request, _error: Exception) -> Response:
        return JSONResponse(error_document(500, "a defect of the server; its log says more"), 500)
