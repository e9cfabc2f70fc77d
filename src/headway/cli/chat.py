"""`headway chat`: a conversation in the terminal. Answers stream; Ctrl-C stops one, Ctrl-D ends the chat.

Piped input works too: one question per line, answers on stdout.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from headway.cli.every_option import every_option
from headway.console.flags import SEED_CLASH, add_flags, chosen, engine_flags, sampling_flags
from headway.console.settled_options import add_settled_flags, settle
from headway.errors import InvalidRequestError, RequestTooLargeError, did_you_mean
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.llm_engine import LLMEngine

DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
# Sampling options without use here, because a chat shows one answer as text.
_WITHOUT = SEED_CLASH | {"n", "logprobs", "prompt_logprobs", "detokenize"}

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message and start over (without TEXT: show it)",
    "/quit": "leave (so does Ctrl-D); Ctrl-C stops the current answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="System message. Default: the model's own, if it has one.")
    parser.add_argument("--quiet", "-q", action="store_true", help="No memory plan and no hints on stderr.")
    add_flags(parser, sampling_flags(DEFAULTS, without=_WITHOUT))
    add_settled_flags(parser, engine_flags())


def run(arguments: argparse.Namespace) -> int:
    settled = settle(arguments, engine_flags(), every_option())
    config = settled.engine_config()
    if arguments.print_config:
        print(settled.toml(), end="")
        return 0
    params = SamplingParams(**chosen(arguments, sampling_flags(DEFAULTS, without=_WITHOUT), DEFAULTS))

    from headway.console.loading import load_engine, stderr_console, stdin_is_terminal

    console = stderr_console()
    engine = load_engine(config, console, quiet=arguments.quiet)
    chat = Chat(engine, params, Conversation(arguments.system), console)
    interactive = stdin_is_terminal()
    if interactive and not arguments.quiet:
        console.print("Type a message. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
    for line in _terminal_lines() if interactive else _piped_lines():
        if not chat.handle(line):
            break
    return 0


@dataclass
class Conversation:
    """The messages so far. The system message is kept apart: it survives a reset and is never dropped."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def say(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def drop_oldest_exchange(self) -> bool:
        """Forget the oldest question with its answer. False when only the newest question is left."""
        for index in range(1, len(self.turns)):
            if self.turns[index]["role"] == "user":
                del self.turns[:index]
                return True
        return False


class Chat:
    """Feeds a conversation to the engine, one question at a time."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, conversation: Conversation, console: Console) -> None:
        self.engine = engine
        self.params = params
        self.conversation = conversation
        self.console = console
        self._num_requests = 0

    def handle(self, line: str) -> bool:
        """Answer a message or obey a /command. False: the chat is over."""
        text = line.strip()
        if text.startswith("/"):
            return self._obey(text)
        if text:
            try:
                self._answer(text)
            except InvalidRequestError as error:
                self._notice(f"headway: error: {error}")
        return True

    def _obey(self, text: str) -> bool:
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            for command, meaning in COMMANDS.items():
                self._notice(f"{command:<14} {meaning}")
        elif name == "/reset":
            self.conversation.turns.clear()
            self._notice("The conversation starts anew.")
        elif name == "/system" and not rest.strip():
            self._notice(f"System message: {self.conversation.system or '(none)'}")
        elif name == "/system":
            self.conversation.system = rest.strip()
            self.conversation.turns.clear()
            self._notice("System message set; the conversation starts anew.")
        else:
            names = tuple(command.split()[0] for command in COMMANDS)
            self._notice(f"Unknown command '{name}'.{did_you_mean(name, names)} /help lists them.")
        return True

    def _answer(self, question: str) -> None:
        before = list(self.conversation.turns)
        self.conversation.say("user", question)
        try:
            request_id = self._queue()
        except InvalidRequestError:
            self.conversation.turns[:] = before
            raise
        with interrupt_flag() as interrupted:
            answer = self._stream(request_id, interrupted)
        self.conversation.say("assistant", answer)

    def _queue(self) -> str:
        """Queue the conversation, dropping its oldest exchanges until it fits with room for an answer."""
        self._num_requests += 1
        request_id = f"chat-{self._num_requests}"
        num_dropped = 0
        while True:
            token_ids = self.engine.preparer.chat_token_ids(self.conversation.messages())
            try:
                self._check_room(len(token_ids))
                self.engine.add_request(request_id, token_ids, self.params)
            except RequestTooLargeError:
                if not self.conversation.drop_oldest_exchange():
                    raise
                num_dropped += 1
                continue
            if num_dropped:
                plural = "s" if num_dropped > 1 else ""
                self._notice(f"The context is full: the oldest {num_dropped} exchange{plural} left the conversation.")
            return request_id

    def _check_room(self, num_tokens: int) -> None:
        limit = self.engine.plan.max_model_len
        room = min(self.params.max_tokens or limit, limit // 4)
        if num_tokens + room > limit and len(self.conversation.turns) > 1:
            raise RequestTooLargeError(f"{num_tokens} tokens leave less than {room} of {limit} for the answer.")

    def _stream(self, request_id: str, interrupted: Callable[[], bool]) -> str:
        answer = ""
        errors: dict[str, str] = {}
        while self.engine.has_unfinished_requests():
            step = self.engine.step()
            errors |= step.errors
            for output in step.outputs:
                text = output.outputs[0].text
                print(text[len(answer) :], end="", flush=True)
                answer = text
            if interrupted():
                self.engine.abort(request_id)
                print(" [stopped]", end="")
        print(flush=True)
        if request_id in errors:
            self._notice(f"headway: error: the answer failed: {errors[request_id]}")
        return answer

    def _notice(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


@contextlib.contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Within this context the first Ctrl-C only sets a flag, because an exception in the middle of a step could corrupt
    the engine's state. A second one interrupts as usual, in case a step hangs."""
    pressed = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _piped_lines() -> Iterator[str]:
    yield from sys.stdin or ()


def _terminal_lines() -> Iterator[str]:
    """Lines typed by a person, with editing and history. Ctrl-C at the prompt clears the line."""
    _remember_history()
    while True:
        try:
            yield input(_prompt())
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _prompt() -> str:
    """The prompt, coloured unless $NO_COLOR is set. \\x01 and \\x02 tell readline that the codes have no width."""
    return "> " if os.environ.get("NO_COLOR") else "\x01\x1b[1;36m\x02> \x01\x1b[0m\x02"


def _remember_history() -> None:
    try:
        import readline
    except ImportError:  # not available on every platform; line editing is optional
        return
    from headway.cache_dir import cache_dir, is_kept, private_folder

    try:
        file = private_folder(cache_dir()) / "chat_history"
    except OSError:
        return
    if is_kept(file):
        readline.read_history_file(file)

    def save() -> None:
        with contextlib.suppress(OSError):
            readline.set_history_length(1000)
            readline.write_history_file(file)

    atexit.register(save)
