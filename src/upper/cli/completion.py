"""Print a completion script for a shell, generated from the verbs and options of this version.

The script runs no program when it completes.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper completion bash > ~/.local/share/bash-completion/completions/upper
upper completion zsh > ~/.zfunc/_upper
upper completion fish > ~/.config/fish/completions/upper.fish
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(RENDER), help="the shell")


def run(args: Namespace, out: Output) -> ExitCode:
    script = RENDER[args.shell](list(words()))
    out.show({"shell": args.shell, "script": script}, text=script.rstrip())
    return ExitCode.OK


@dataclass(frozen=True)
class Word:
    """A word that may follow `path`, and its description."""

    path: tuple[str, ...]
    text: str
    help: str
    values: tuple[str, ...] | None = None  # what may follow an option that takes one; empty for anything


def words() -> Iterator[Word]:
    """Every verb, option and fixed choice, in the order in which help shows them."""
    from upper.cli.verbs import VERBS, load, parser_of, top_parser

    yield from _of_parser((), top_parser())
    for name, (_, summary) in VERBS.items():
        yield Word((), name, summary)
        yield from _of_parser((name,), parser_of(name, load(name)))


def _of_parser(path: tuple[str, ...], parser: ArgumentParser) -> Iterator[Word]:
    for action in parser._actions:
        about = "" if action.help is SUPPRESS else action.help or ""
        about = about.replace("%(default)s", str(action.default)).replace("%%", "%")
        if isinstance(action, _SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield Word(path, name, summaries.get(name, ""))
                yield from _of_parser((*path, name), child)
        elif action.option_strings:
            values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            yield from (Word(path, option, about, values) for option in action.option_strings)
        elif action.choices is not None:
            yield from (Word(path, str(choice), about) for choice in action.choices)


def _grouped(known: list[Word]) -> dict[tuple[str, ...], list[Word]]:
    groups: dict[tuple[str, ...], list[Word]] = {}
    for word in known:
        groups.setdefault(word.path, []).append(word)
    return groups


def _cases(known: list[Word], render: Callable[[list[Word]], str]) -> str:
    """The arms of a shell's `case`: by the verb and the word before, what may stand here.

    Where any value is allowed, nothing is offered, and the shell completes file names.
    """
    arms = []
    for path, group in _grouped(known).items():
        verb = " ".join(path)
        for word in group:
            if word.values is not None:
                offered = [Word((), value, word.help) for value in word.values]
                arms.append(f'        "{verb} {word.text}") {render(offered)} ;;')
        arms.append(f'        "{verb} "*) {render(group)} ;;')
    return "\n".join(arms)


def _bash(known: list[Word]) -> str:
    # The longest path whose words all stand on the line, in order, decides what may follow.
    cases = _cases(known, lambda group: f'words="{" ".join(word.text for word in group)}"')
    paths = " ".join(f'"{" ".join(path)}"' for path in _grouped(known) if path)
    return f"""\
# bash completion for upper
_upper() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" path="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        local longer="${{path:+$path }}$word" candidate
        for candidate in {paths}; do
            if [[ "$candidate" == "$longer" ]]; then path="$longer"; fi
        done
    done
    case "$path ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _upper upper
"""


def _zsh(known: list[Word]) -> str:
    cases = _cases(known, lambda group: f"words_here=({' '.join(_quoted(_zsh_pair(w)) for w in group)})")
    paths = " ".join(f'"{" ".join(path)}"' for path in _grouped(known) if path)
    return f"""\
#compdef upper
_upper() {{
    local path_so_far="" longer word
    local -a words_so_far paths words_here
    words_so_far=("${{(@)words[2,CURRENT-1]}}")
    paths=({paths})
    for word in $words_so_far; do
        longer="${{path_so_far:+$path_so_far }}$word"
        if (( ${{paths[(Ie)$longer]}} )); then path_so_far="$longer"; fi
    done
    case "$path_so_far $words[CURRENT-1]" in
{cases}
    esac
    _describe 'upper' words_here || _files
}}
# Found on fpath this file is the function itself; sourced, it has to be announced.
if [[ "$funcstack[1]" == _upper ]]; then _upper "$@"; else compdef _upper upper; fi
"""


def _zsh_pair(word: Word) -> str:
    return f"{word.text}:{word.help}" if word.help else word.text


def _fish(known: list[Word]) -> str:
    lines = ["# fish completion for upper"]
    verbs = " ".join(word.text for word in known if word.path == () and not word.text.startswith("-"))
    for word in known:
        when = (
            f"__fish_seen_subcommand_from {word.path[-1]}"
            if word.path
            else f"not __fish_seen_subcommand_from {verbs}"
        )
        if word.text.startswith("--"):
            what = f"-l {word.text[2:]}"
        elif word.text.startswith("-"):
            what = f"-s {word.text[1:]}"
        else:
            what = f"-a {_quoted(word.text)}"
        if word.values is not None:
            what += f" -x -a {_quoted(' '.join(word.values))}" if word.values else " -r"
        lines.append(f"complete -c upper -n {_quoted(when)} {what} -d {_quoted(word.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


RENDER = {"bash": _bash, "zsh": _zsh, "fish": _fish}
