"""The parser of the command line: a wrong word shows the usage and the nearest right one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from launcher.base.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the usage of the command that the words are for."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse what is left, here and not in the parser above."""
        self._words = args or ()
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is no choice, and name the nearest one; argparse lists them all."""
        if action.choices is not None and value not in action.choices:
            if action.nargs == argparse.PARSER:  # behind it stand another command's words
                self._words = self._words[: self._words.index(value)]
            remedy = nearest(str(value), [*map(str, action.choices)])
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}. {remedy}")

    def error(self, message: str) -> NoReturn:
        """Print the usage, what is wrong and what is nearest to a wrong option; exit with 2."""
        words = takewhile("--".__ne__, self._words)
        if wrong := next((word for word in words if self._is_wrong(word)), None):
            message = f"unrecognized option: {wrong}\n  {self._remedy(wrong)}"
        super().error(message)

    def _is_wrong(self, word: str) -> bool:
        """Whether a word is an option, or the beginning of one, that this command hasn't."""
        name = word.partition("=")[0]
        known = self._option_string_actions
        return word[:2] == "--" and not any(one.startswith(name) for one in known)

    def _remedy(self, word: str) -> str:
        """What to write in place of an option that this command hasn't."""
        name, _, value = word.partition("=")
        known = [one for one in self._option_string_actions if one[:2] == "--"]
        if "--set" in known:  # then it may be one of the training program's
            from launcher.runs.plan import arguments

            table = arguments.table()
            if name in table.gpt or name in table.megatron:
                kinds = table.kinds_of(table.releases[-1]) | table.kinds_of(None)
                following = [*self._words, "VALUE"][[*self._words].index(word) + 1]
                given = "true" if kinds.get(name) == "flag" else value or following
                return f"It is a key of the run file: --set {arguments.key_of(name)}={given}"
        return nearest(name, known)
