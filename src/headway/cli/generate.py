"""`headway generate`: complete one or many prompts; answers on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.every_option import every_option
from headway.console.flags import SEED_CLASH, add_flags, chosen, engine_flags, sampling_flags
from headway.console.output_files import check_writable
from headway.console.settled_options import add_settled_flags, settle
from headway.console.step_profiler import LATEST_FIRST_STEP, add_profile_flags, first_step_of, profile_steps
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from headway.console.step_profiler import Step
    from headway.engine.llm_engine import LLMEngine
    from headway.outputs import RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="A prompt. Without one, stdin is the prompt.")
    parser.add_argument("--prompt-file", metavar="FILE", help="Take prompts from a file, one per line; - is stdin.")
    parser.add_argument("--chat", action="store_true", help="Wrap each prompt in the model's chat template.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per prompt.")
    parser.add_argument("--quiet", "-q", action="store_true", help="No memory plan and no statistics on stderr.")
    add_profile_flags(parser, "of the run")
    add_flags(parser, sampling_flags(DEFAULTS, without=SEED_CLASH))
    add_settled_flags(parser, engine_flags())


def run(arguments: argparse.Namespace) -> int:
    settled = settle(arguments, engine_flags(), every_option())
    config = settled.engine_config()
    if arguments.print_config:
        print(settled.toml(), end="")
        return 0
    params = SamplingParams(**chosen(arguments, sampling_flags(DEFAULTS, without=SEED_CLASH), DEFAULTS))
    if not arguments.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise InvalidRequestError("Log-probabilities are printed only as JSON: add --json.", param="logprobs")
    check_writable(arguments.profile)
    prompts = _collect_prompts(arguments)

    from headway.console.loading import load_engine, stderr_console

    console = stderr_console()
    engine = load_engine(config, console, quiet=arguments.quiet)
    started = time.monotonic()
    order = _queue(engine, prompts, params, chat=arguments.chat)
    printer = _JsonPrinter() if arguments.json else _TextPrinter(len(prompts), params)
    if arguments.profile is None:
        ended = _run_to_end(engine, order, printer, engine.step)
    else:
        ended = _run_profiled(engine, order, printer, params, arguments, console)
    if not arguments.quiet:
        console.print(_statistics(ended.outputs, time.monotonic() - started), style="dim")
    for request_id, reason in ended.errors.items():
        console.print(f"headway: error: {request_id} failed: {reason}", markup=False)
    return 1 if ended.errors else 0


@dataclass(frozen=True)
class _Ended:
    """The results of the prompts."""

    outputs: list[RequestOutput]
    """In the order of the prompts."""
    errors: dict[str, str]
    """Why requests have failed, by request id."""


def _collect_prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompts)
    if arguments.prompt_file is not None:
        text = sys.stdin.read() if arguments.prompt_file == "-" else _read_file(arguments.prompt_file)
        prompts += [line for line in text.splitlines() if line.strip()]
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise InvalidRequestError("No prompt: give one as an argument, with --prompt-file, or on stdin.")
        prompts.append(sys.stdin.read())
    if not any(prompt.strip() for prompt in prompts):
        raise InvalidRequestError("The prompt is empty: give some text to complete.", param="prompt")
    return prompts


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequestError(f"Cannot read the prompt file '{name}': {reason}.", param="prompt_file") from error


def _queue(engine: LLMEngine, prompts: list[str], params: SamplingParams, *, chat: bool) -> list[str]:
    """Add every prompt to the engine. Returns the request ids in order."""
    order = []
    for index, prompt in enumerate(prompts):
        request_id = f"prompt-{index}"
        if chat:
            token_ids = engine.preparer.chat_token_ids([{"role": "user", "content": prompt}])
            engine.add_request(request_id, token_ids, params)
        else:
            engine.add_request(request_id, prompt, params)
        order.append(request_id)
    return order


def _run_profiled(
    engine: LLMEngine,
    order: list[str],
    printer: _TextPrinter | _JsonPrinter,
    params: SamplingParams,
    arguments: argparse.Namespace,
    console: Console,
) -> _Ended:
    """Run as `_run_to_end` does, and trace some steps. Answers may end early, so the traced window begins early."""
    ended: list[_Ended] = []
    profile_steps(
        engine.step,
        lambda step: ended.append(_run_to_end(engine, order, printer, step)),
        path=arguments.profile,
        first_step=min(LATEST_FIRST_STEP, first_step_of(params.max_tokens or engine.plan.max_model_len)),
        num_steps=arguments.profile_steps,
        console=console,
    )
    return ended[0]


def _run_to_end(engine: LLMEngine, order: list[str], printer: _TextPrinter | _JsonPrinter, step: Step) -> _Ended:
    """Step until all requests have ended. Results are printed in the order of the prompts, as soon as that allows."""
    finished: dict[str, RequestOutput] = {}
    errors: dict[str, str] = {}
    num_printed = 0
    while engine.has_unfinished_requests():
        stepped = step()
        errors |= stepped.errors
        for output in stepped.outputs:
            printer.progress(output)
            if output.finished:
                finished[output.request_id] = output
        while num_printed < len(order) and order[num_printed] in finished:
            printer.result(finished[order[num_printed]])
            num_printed += 1
    return _Ended([finished[request_id] for request_id in order], errors)


class _TextPrinter:
    """Prints text. A single completion is streamed; several are printed whole, each under a heading."""

    def __init__(self, num_prompts: int, params: SamplingParams) -> None:
        self._streams = num_prompts == 1 and params.n == 1 and params.detokenize and params.can_stream
        self._many = num_prompts > 1 or params.n > 1
        self._detokenize = params.detokenize
        self._num_printed_chars = 0

    def progress(self, output: RequestOutput) -> None:
        if self._streams:
            text = output.outputs[0].text
            print(text[self._num_printed_chars :], end="", flush=True)
            self._num_printed_chars = len(text)

    def result(self, output: RequestOutput) -> None:
        if self._streams:
            print()
            return
        for completion in output.outputs:
            if self._many:
                choice = f" ({completion.index + 1})" if len(output.outputs) > 1 else ""
                print(f"=== {output.request_id}{choice}")
            print(completion.text if self._detokenize else " ".join(map(str, completion.token_ids)), flush=True)


class _JsonPrinter:
    """Prints one JSON object per line, with everything the Python API returns."""

    def progress(self, output: RequestOutput) -> None:
        pass

    def result(self, output: RequestOutput) -> None:
        print(json.dumps(dataclasses.asdict(output), ensure_ascii=False), flush=True)


def _statistics(finished: list[RequestOutput], elapsed_s: float) -> str:
    num_in = sum(len(output.prompt_token_ids) for output in finished)
    num_out = sum(len(completion.token_ids) for output in finished for completion in output.outputs)
    return (
        f"{len(finished)} prompt{'s' if len(finished) != 1 else ''}: {num_in} tokens in, {num_out} out "
        f"in {elapsed_s:.2f} s ({num_out / max(elapsed_s, 1e-9):.1f} tokens/s)"
    )
