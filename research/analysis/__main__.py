"""Command line of `polydraft analyze`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.errors import ConfigError, LoadError
from loadtest.arguments import Parser
from loadtest.results import add_output_argument, write
from research.analysis import arms, gguf_tokens, latents, limits, pair, selfcheck, states
from research.analysis.papers import run as papers

_LONGEST_AT_A_TERMINAL = 2000
_DESCRIPTION = """\
Answer questions about a target model and its draft model, without a server.
Commands that load models take the embedded pair unless --target and --draft
name others. Tables for reading go to standard error, and the same figures as
JSON to standard output."""
_EPILOG = """\
which command helps with what:
  a pair of models that you want to serve  selfcheck, then pair; arms
  what takes the time on this machine      limits, latents, states
  the tokens of a GGUF file                gguf-tokens
  rules of verification on paper           papers

`polydraft analyze COMMAND --help` lists the flags of a command. Words such as
rule, chain, head and acceptance are explained in docs/quickstart.md.
`polydraft bench` compares with other servers (--address) and other versions
(--before)."""


class Analysis(NamedTuple):
    """Command of `polydraft analyze`."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]
    """Returns the JSON document; its `passed` is false if a check failed."""
    table: Callable[[dict[str, Any]], str] | None = None
    """Renders the document for people; None for a command that writes its files itself."""


def _analysis(module: Any, question: str) -> Analysis:
    """Return the command of a module with the functions `add_arguments` and `analyze`.

    They add arguments to a parser, and return the document. Most modules also have `markdown`.
    """
    return Analysis(question, module.add_arguments, module.analyze, getattr(module, "markdown", None))


ANALYSES = {
    "selfcheck": _analysis(
        selfcheck,
        "Are the answers of this pair distributed as those of the target alone? Tests every rule; exit code 1 if not.",
    ),
    "pair": _analysis(
        pair, "How well does this draft model guess for this target? Ends with the flags of `polydraft serve` to use."
    ),
    "arms": _analysis(arms, "How much faster are answers with drafts on this machine than without?"),
    "gguf-tokens": _analysis(
        gguf_tokens, "Has a GGUF file the same tokens here as in llama.cpp? Needs llama-cpp-python, and no weights."
    ),
    "limits": _analysis(
        limits, "What limits passes and steps here, after short and long texts, and how much of the speedup is left?"
    ),
    "latents": _analysis(
        latents, "How fast are passes over latents (MLA) on a CPU, next to passes over the K and V of all heads?"
    ),
    "states": _analysis(
        states,
        "How fast are passes of recurrent layers that store inputs of drafted nodes, next to passes that store a state "
        "of each node?",
    ),
    "papers": _analysis(
        papers,
        "What do the experiments of three papers on verification find for this pair? Takes half an hour on two cores.",
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = Parser(
        prog="polydraft analyze",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, analysis in ANALYSES.items():
        command = commands.add_parser(name, help=analysis.help, description=analysis.help)
        analysis.add_arguments(command)
        if analysis.table is not None:
            add_output_argument(command)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one analysis.

    Return 0, 1 if a self-check failed or a model cannot be loaded, 2 for bad input.
    """
    options = parser().parse_args(arguments)
    analysis = ANALYSES[options.command]
    try:
        result = analysis.run(options)
    except (ConfigError, LoadError) as error:
        print(f"polydraft analyze: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if analysis.table is not None:
        print(analysis.table(result), file=sys.stderr)
        write(result, options.output)
    text = json.dumps(result)
    if sys.stdout.isatty() and len(text) > _LONGEST_AT_A_TERMINAL:
        text = f"({len(text)} characters of JSON: redirect the output to see them)"
    print(text)
    return 1 if isinstance(result, dict) and not result.get("passed", True) else 0


if __name__ == "__main__":
    sys.exit(main())
