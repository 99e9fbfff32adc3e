"""The argument parser of all commands: what to write instead of an unknown command, option or argument."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from hetero_mpi.util.terminal import fold_line


class _Help(argparse.HelpFormatter):
    """Help formatter that breaks lines only between words and prints each command on one line."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 2  # argparse ignores the indent of commands

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fold_line(" ".join(text.split()), width, indent="")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line for part in text.splitlines() for line in fold_line(part, width, indent, indent))


LAUNCH_OPTIONS = ("--print", "-np", "--hostfile", "--hosts", "--mpirun-args", "--elastic", "--recover")
"""Options of ``launch`` that people write behind its command."""


class Parser(argparse.ArgumentParser):
    """Argument parser that says what to write instead of an unknown command or option. Also the class of subparsers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "formatter_class": _Help})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        namespace, unknown_words = super().parse_known_args(args, namespace)
        if problems := list(self._problems(words, unknown_words)):
            self.error("\n".join(problems))
        return namespace, unknown_words

    def _problems(self, words: list[str], unknown_words: list[str]) -> Iterator[str]:
        """Explain each unknown word, with what to write instead. The value of an unknown option belongs to the option."""
        used, displaced = "", 0
        for word in unknown_words:
            after, before = words[words.index(word) + 1 :][:1], words[: words.index(word)][-2:]
            if word.startswith("-"):
                name, equals, text = word.partition("=")
                is_job = after and after[0].endswith(".toml") and name.strip("-") not in ("config", "c", "f", "job")
                text = text if equals or not after or after[0].startswith("--") or is_job else after[0]
                used = "" if equals else text
                displaced += used != "" and used not in unknown_words
                yield f"unknown option: {word}{self._instead(name.lstrip('-'), text or None, name)}"
            elif word == used or displaced:
                displaced -= word != used
            else:
                is_split = before[:1] == ["--set"] and "=" not in before[1]
                name, equals, text = (before[1], "=", word) if is_split else word.partition("=")
                yield f"unexpected argument: {word}{self._instead(name, text) if equals else ''}"

    def _instead(self, name: str, value: str | None, option: str = "") -> str:
        """Return what to write instead of an option, or a key of the job, that does not exist; "" if nothing is similar."""
        from hetero_mpi.job.other_names import instead_of_key, instead_of_option  # imports pydantic

        options = {text.lstrip("-").replace("-", "_"): text for text in self._option_string_actions}
        if len(name) > 1 and (same := options.get(name.replace("-", "_").lower(), "")) and same != option:
            return f"; did you mean {same}?"
        text = instead_of_option(self.prog.split()[-1], name, value)
        if not text and "--set" in self._option_string_actions:
            text = instead_of_key(name, value, True)
        nearest = _nearest(
            option, self._option_string_actions, 0.8 if text.startswith("did you mean") else 0.9 if text else 0.75
        )
        if not (nearest or text) and option in LAUNCH_OPTIONS:
            return f"; it is an option of launch: write it before `-- {self.prog.split()[-1]}`"
        return nearest or f"; {text or f'`{self.prog} --help` lists the options'}"

    def error(self, message: str) -> NoReturn:
        super().error(message + ("; `hetero-mpi init` lists example jobs" if message.endswith("required: JOB") else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _nearest(str(value), action.choices or ())
            if isinstance(action, argparse._SubParsersAction):
                hint = _instead_of_command(str(value)) or hint
            raise argparse.ArgumentError(action, error.message + hint) from None


def _instead_of_command(word: str) -> str:
    from hetero_mpi.job.other_names import read_names

    if text := read_names()["commands"].get(word.lower().replace("_", "-")):
        return f"; write {text}"
    kinds = {".toml": f"train {word}", ".py": "its own command: mpirun -np N python " + word}
    kinds |= dict.fromkeys((".yml", ".yaml", ".json", ".sh"), f"init --from {word}")
    if word.startswith(("python", "hetero-mpi", "hetero_mpi")):
        return "; write only a command of hetero-mpi: train JOB; or start a script with mpirun -np N python SCRIPT"
    return f"; write {kinds[Path(word).suffix]}" if Path(word).suffix in kinds else ""


def _nearest(word: str, valid_words: Iterable[str], cutoff: float = 0.6) -> str:
    matches = difflib.get_close_matches(word, list(valid_words), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""


class Key(argparse._AppendAction):
    """Action for an option that is an alias for ``--set KEY=VALUE``."""

    def __init__(self, key: str, **named: Any) -> None:
        super().__init__(**{**named, "dest": "overrides", "default": argparse.SUPPRESS})
        self._key = key

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        super().__call__(parser, namespace, f"{self._key}={'true' if value is True else value}", option)
