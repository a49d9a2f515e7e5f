"""`polydraft chat`: a conversation in the terminal, colored by the origin of tokens."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.chat.wrapping import WordWrap
from server.wire.suggest import did_you_mean

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from server.chat.conversation import Conversation

_HELP = """\
/spec [on|off]   draft with speculation, or decode plainly, from the next answer on
/new             begin a new conversation
/system TEXT     set the system prompt; without TEXT remove it
/set NAME VALUE  set a field of requests, such as temperature; without VALUE remove it; /set shows all
/save FILE       write the conversation and its settings
/load FILE       go on with a saved conversation
/help            show this
/quit            leave (or Ctrl+D)

Ctrl+C ends an answer early. Alt+Enter begins a new line; several lines may also stand between \"\"\".
"""
_STYLES = {
    "token-accepted": "ansigreen",
    "token-own": "ansiblue",
    "thought": "italic",
    "note": "ansibrightblack",
    "error": "ansired",
    "bottom-toolbar": "noreverse bg:default ansibrightblack",
}
_COMMANDS = ("/help", "/load", "/new", "/quit", "/save", "/set", "/spec", "/system")
_SETTINGS = (
    "frequency_penalty", "max_tokens", "min_p", "presence_penalty", "reasoning_effort", "repetition_penalty", "seed",
    "stop", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Fields of requests that `/set` sets."""
_QUOTES = '"' * 3
# A model's text must not move the cursor. The library writes no escape; these are the other control
# characters.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(
        prog="polydraft chat",
        description="Chat with a running daemon. Accepted drafts are green, the model's own tokens blue. If the daemon "
        "wants an API key, it is read from POLYDRAFT_API_KEY.",
        allow_abbrev=False,
    )
    result.add_argument("--url", default="http://localhost:8000", help="the daemon (default http://localhost:8000)")
    result.add_argument("--model", help="name of the model (default: the served one)")
    result.add_argument("--system", default="", help="system prompt")
    result.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default 1024)")
    result.add_argument("--temperature", type=float, help="sampling temperature (default: the model's)")
    result.add_argument("--seed", type=int, help="seed of every answer (default: none)")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the user leaves; 1 if the daemon cannot be reached, 2 without a terminal."""
    command = parser()
    options, unknown = command.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in command._actions for flag in action.option_strings]
        command.error(f"unknown: {unknown[0]}{did_you_mean(unknown[0], flags)}")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("polydraft chat: needs a terminal; send single requests with curl (docs/quickstart.md)", file=sys.stderr)
        return 2
    try:
        from server.chat.conversation import ChatError, Conversation, client_of, served_model
    except ModuleNotFoundError as error:
        install = f"{sys.executable} -m pip install {error.name}"
        print(f"polydraft chat: needs {error.name}; install it: {install}", file=sys.stderr)
        return 2
    wanted = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    fields = {name: value for name, value in wanted.items() if value is not None}
    try:
        with client_of(options.url.rstrip("/")) as client:
            model = served_model(client, options.model, lambda: print("the model is still loading"))
            Terminal(Conversation(client, model, options.system, options=fields)).run()
    except ChatError as error:
        print(f"polydraft chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


class Terminal:
    """Terminal view of a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        from prompt_toolkit.styles import Style

        self._conversation = conversation
        self._style = Style.from_dict(_STYLES)

    def run(self) -> None:
        """Read messages and commands until the user leaves."""
        session = self._session()
        self._show("chat with ", ("note", f"{self._conversation.model}; /help lists the commands\n"))
        self._show(("token-accepted", "accepted from a draft"), ", ", ("token-own", "the model's own token"), "\n")
        while True:
            try:
                text = _whole_message(session.prompt)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(*text.split(maxsplit=1))
            elif text:
                self._answer(text)

    def _session(self) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.key_binding.key_processor import KeyPressEvent

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return PromptSession(
            "\n> ",
            completer=WordCompleter(_COMMANDS, sentence=True),
            complete_while_typing=False,
            reserve_space_for_menu=len(_COMMANDS),
            bottom_toolbar=lambda: self.status(),
            key_bindings=keys,
            style=self._style,
        )

    def status(self) -> str:
        """Return the status line: settings, and speculation of the last answer."""
        conversation = self._conversation
        parts = [conversation.model, f"speculation {'on' if conversation.speculates else 'off'}"]
        if metrics := conversation.metrics:
            parts += _figures(metrics)
        return _fitting(parts, _columns())

    def _answer(self, message: str) -> None:
        """Show an answer while it arrives, until it ends or Ctrl+C."""
        from prompt_toolkit.utils import get_cwidth

        from server.chat.conversation import ChatError

        was_thought = False
        wrap = WordWrap(_columns(), get_cwidth)
        answer = self._conversation.ask(message)
        try:
            for text, origin, is_thought in answer:
                if was_thought and not is_thought:
                    self._show(*wrap.feed("", "\n"))
                was_thought = is_thought
                style = f"token-{origin}{' class:thought' if is_thought else ''}"
                self._show(*wrap.feed(style, text.translate(_CONTROLS)))
            self._show(*wrap.flush(), "\n")
            if self._conversation.cut:
                self._show(("note", f"{self._conversation.cut}\n"))
        except KeyboardInterrupt:
            answer.close()
            self._show(*wrap.flush(), "\n", ("note", "ended early\n"))
        except ChatError as error:
            self._show(*wrap.flush(), "\n", ("error", f"{error}\n"))

    def _command(self, name: str, value: str = "") -> None:
        conversation = self._conversation
        if name == "/spec" and value in ("", "on", "off"):
            conversation.speculates = not conversation.speculates if not value else value == "on"
            self._show(("note", f"speculation is {'on' if conversation.speculates else 'off'}\n"))
        elif name == "/new":
            conversation.clear()
            self._show(("note", "a new conversation\n"))
        elif name == "/system":
            conversation.system = value
            self._show(("note", f"the system prompt is {'set' if value else 'empty'}\n"))
        elif name == "/set":
            self._set(*value.split(maxsplit=1))
        elif name in ("/save", "/load"):
            self._file(name, value)
        elif name == "/help":
            self._show(("note", _HELP))
        else:
            self._show(("error", f"{name} {value}".rstrip() + ": unknown; /help lists the commands\n"))

    def _set(self, name: str = "", value: str = "") -> None:
        """Set or remove a field of requests; the daemon checks its value with the next one."""
        options = self._conversation.options
        if name and name not in _SETTINGS:
            self._show(("error", f"{name}: unknown{did_you_mean(name, _SETTINGS)}; one of {', '.join(_SETTINGS)}\n"))
            return
        if value:
            options[name] = value
            with contextlib.suppress(ValueError):
                options[name] = json.loads(value)
        elif name:
            options.pop(name, None)
        settings = ", ".join(f"{key} {json.dumps(options[key])}" for key in sorted(options))
        self._show(("note", f"{settings or 'all settings are the defaults of the model'}\n"))

    def _file(self, name: str, value: str) -> None:
        from server.chat.conversation import ChatError

        if not value:
            self._show(("error", f"{name}: name a file, as in {name} FILE\n"))
            return
        conversation = self._conversation
        try:
            path = Path(value).expanduser()
            if name == "/save":
                conversation.save(path)
            else:
                conversation.load(path)
        except (ChatError, RuntimeError) as error:  # a home folder that nobody has is a RuntimeError
            self._show(("error", f"{error}\n"))
            return
        done = "saved" if name == "/save" else "loaded"
        self._show(("note", f"{len(conversation.messages)} messages are {done}\n"))

    def _show(self, *parts: str | tuple[str, str]) -> None:
        """Print texts with their styles."""
        from prompt_toolkit import print_formatted_text
        from prompt_toolkit.formatted_text import FormattedText

        styled = [("", part) if isinstance(part, str) else (f"class:{part[0]}", part[1]) for part in parts]
        print_formatted_text(FormattedText(styled), end="", style=self._style)


def _whole_message(prompt: Callable[..., str]) -> str:
    """Return a message; one that begins with three quotes goes on until a line ends with them."""
    text = prompt().strip()
    if not text.startswith(_QUOTES):
        return text
    while not (text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES)):
        text += "\n" + prompt(". ").rstrip()
    return text[len(_QUOTES) : -len(_QUOTES)].strip("\n")


def _columns() -> int:
    """Return the columns of the terminal as it is now, whatever `COLUMNS` says."""
    from prompt_toolkit.application.current import get_app_session

    return get_app_session().output.get_size().columns


def _fitting(parts: Sequence[str], width: int) -> str:
    """Return the first parts that fit into a line; a first part that does not is cut."""
    from prompt_toolkit.utils import get_cwidth

    line = parts[0]
    for part in parts[1:]:
        longer = f"{line} · {part}"
        if get_cwidth(longer) > width:
            break
        line = longer
    while get_cwidth(line) > max(width, 1):
        line = line.removesuffix("…")[:-1] + "…"
    return line


def _figures(metrics: dict[str, Any]) -> list[str]:
    """Return the figures of an answer's metrics, in words."""
    counted, rate = metrics["speculative_decoding"], metrics["tokens_per_second"]
    figures = ["no drafts"] if counted is None else [f"{counted['tokens_per_pass']:.2f} tokens per pass"]
    if counted is not None and counted["speedup"] is not None:
        figures.append(f"{counted['speedup']:.2f}x plain decoding")
    if rate is not None:
        figures.append(f"{rate:.0f} tokens/s")
    if counted is not None:
        figures.append(f"rule {counted['rule']}")
    return figures


if __name__ == "__main__":
    sys.exit(main())
