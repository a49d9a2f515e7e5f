"""Finds out at start, by rendering questions, what turns thoughts on and off in a chat template.

It also finds which words of effort the template accepts, and what each does.

A word is accepted if a word that does not exist is refused or has another effect. Off is what
closes the thoughts, whatever its name is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

from server.text.probe import Probe, tail
from server.text.reasoning import is_closed, is_open
from server.text.thought_marks import ThoughtMarks
from server.wire.fields import Effort

EFFORTS: tuple[Effort, ...] = tuple(word for word in get_args(Effort) if word != "none")
_USUAL: tuple[Effort, ...] = ("low", "medium", "high")
"""Words that a template accepts if it shows any word."""
_OFF_WORDS = ("none", "no_think", "disabled", "off", "minimal", "low")
_ON_WORDS = ("enabled", "on")
_MESSAGE_WORDS = ("/no_think", "/think")
_NAME = re.compile(r"think|reason|effort")
_NONSENSE = "polydraftword"
_SPELLINGS: tuple[Callable[[str], str], ...] = (str, str.capitalize, str.upper)
_DEFAULTS = {"opened": "on", "closed": "off", "left to the model": "left to the model"}


@dataclass(frozen=True)
class Setting:
    """Variables of a chat template, and a word in the last user message that it takes out."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""

    def __str__(self) -> str:
        parts = [f"{name}={str(value).lower()}" for name, value in self.variables.items()]
        return " ".join([*parts, self.word]).strip() or "always"


@dataclass(frozen=True)
class ThinkingSettings:
    """Settings of one chat template."""

    off: Setting | None = None
    """Closes the thoughts; None if nothing does."""
    on: Setting | None = None
    """Turns thoughts on; None if the template has no switch for it."""
    efforts: Mapping[Effort, Setting] = field(default_factory=dict)
    """Setting of the nearest accepted word, by the requested one; empty if there are no words."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Thoughts of the prompt by accepted word: opened, closed, or left to the model."""
    default: str = ""
    """Thoughts of a prompt without settings."""

    def __bool__(self) -> bool:
        return self.off is not None or self.on is not None or bool(self.efforts)

    def word_of(self, effort: Effort) -> str:
        """Return the accepted word, or the name of the switch, for a requested one."""
        return _last_word(self.efforts[effort])

    def is_exact(self, effort: Effort) -> bool:
        """Return whether the accepted word is the requested one."""
        word = self.word_of(effort)
        return effort in (word.lower(), _effort_of(word))

    def __str__(self) -> str:
        parts = [f"{self.default} by default"]
        parts.append("cannot be turned off" if self.off is None else f"off: {self.off}")
        if self.on is not None:
            parts.append(f"on: {self.on}")
        if self.efforts:
            parts.append("efforts: " + ", ".join(f"{effort} {self.word_of(effort)}" for effort in self.efforts))
        if self.words:
            parts.append("accepted words: " + ", ".join(f"{word} ({does})" for word, does in self.words.items()))
        return "; ".join(parts)

    def card(self) -> dict[str, Any]:
        """Return the table for /v1/models."""

        def shown(setting: Setting | None) -> Any:
            return (
                None if setting is None else {**setting.variables, **({"word": setting.word} if setting.word else {})}
            )

        return {
            "default": self.default,
            "off": shown(self.off),
            "on": shown(self.on),
            "efforts": {effort: self.word_of(effort) for effort in self.efforts},
            "words": dict(self.words),
        }


def thinking_switch(probe: Probe, marks: ThoughtMarks | None) -> ThinkingSettings:
    """Return the settings of a chat template; marks: around thoughts, if they are known."""
    if probe.plain is None:
        return ThinkingSettings()
    return _Search(probe, marks).settings()


class _Search:
    """Search with a template that renders questions."""

    def __init__(self, probe: Probe, marks: ThoughtMarks | None) -> None:
        self._probe = probe
        self._marks = marks
        self._names = sorted(name for name in probe.tokenizer.template_variables() if _NAME.search(name))
        self._switches = [name for name in self._names if self._is_switch(name)]
        self._on = Setting({name: self._turns_on(name) for name in self._switches if _effort_of(name) is None})

    def settings(self) -> ThinkingSettings:
        accepted = self._accepted()
        off = self._off()
        is_off = off is not None and self._prompt(off) == self._probe.plain
        default = "off" if is_off else _DEFAULTS[self._thoughts(Setting())]
        on = self._turned_on(off)
        nearest = {effort: accepted[_nearest(effort, [*accepted])] for effort in EFFORTS if accepted}
        if on is None and is_off and accepted:
            on = nearest["medium"]
        if on is not None and on.word and default == "on":
            on = Setting()
        words = {_last_word(setting): self._thoughts(setting) for setting in accepted.values()}
        if off is not None and off.variables and not self._on.variables:
            words = {_last_word(off): self._thoughts(off), **words}
        return ThinkingSettings(off, on, nearest, words, default)

    def _turns_on(self, name: str) -> bool:
        """Return the value of a switch with which thoughts may follow."""
        if self._thoughts(Setting({name: True})) == "opened":
            return True
        return self._thoughts(Setting({name: True})) != "closed" and self._thoughts(Setting({name: False})) != "opened"

    def _prompt(self, setting: Setting) -> str | None:
        return self._probe.question(setting.variables, setting.word)

    def _is_switch(self, name: str) -> bool:
        """Return whether true and false have different effects, and are not shown as words."""
        on, off = (self._probe.question({name: value}) for value in (True, False))
        shown = self._probe.question({name: _NONSENSE}) or ""
        return on is not None and off is not None and on != off and _NONSENSE not in shown.lower()

    def _thoughts(self, setting: Setting) -> str:
        """Return whether a prompt opens or closes thoughts, or leaves them to the model."""
        prompt = self._prompt(setting)
        if prompt is None or self._marks is None:
            return "left to the model"
        end = tail(prompt)
        if is_open(end, self._marks):
            return "opened"
        empty = re.compile(rf"{re.escape(self._marks.open.strip())}\s*{re.escape(self._marks.close)}")
        if is_closed(end, self._marks) or empty.search(end):
            return "closed"
        return "left to the model"

    def _candidates(self, words: Sequence[str], value: bool) -> Iterator[Setting]:
        """Yield settings that may turn thoughts on or off, the likeliest first."""
        yield from (Setting({name: is_on == value}) for name, is_on in self._on.variables.items())
        for word in words:
            names = [name for name in self._names if name not in self._switches]
            yield from (Setting({name: word}) for name in names if self._knows(name, word, Setting()))
        for word in _MESSAGE_WORDS[value : value + 1]:
            prompt = self._probe.question(word=word)
            if prompt is not None and word not in prompt:
                yield Setting(word=word)

    def _off(self) -> Setting | None:
        """Return the setting that closes thoughts, or else the one that the template has for it."""
        candidates = [setting for setting in self._candidates(_OFF_WORDS, False) if self._prompt(setting) is not None]
        closing = next((setting for setting in candidates if self._thoughts(setting) == "closed"), None)
        if closing is not None or self._thoughts(Setting()) == "closed":
            return closing or Setting()
        for setting in candidates:
            is_effort = any(value in EFFORTS for value in setting.variables.values())
            if not is_effort and self._thoughts(setting) != "opened":
                return setting
        return None

    def _turned_on(self, off: Setting | None) -> Setting | None:
        if self._on.variables and self._prompt(self._on) is not None:
            return self._on
        without = self._probe.plain if off is None else self._prompt(off)
        for setting in self._candidates(_ON_WORDS, True):
            if self._prompt(setting) not in (None, without) and self._thoughts(setting) != "closed":
                return setting
        return None

    def _accepted(self) -> dict[Effort, Setting]:
        by_name = {_effort_of(name): {**self._on.variables, name: True} for name in self._switches if _effort_of(name)}
        by_word = {cast(Effort, word): Setting(variables) for word, variables in by_name.items()}
        names = [name for name in self._names if name not in self._switches]
        for name, spell in itertools.product(names, _SPELLINGS):
            by_word = by_word or {word: self._with(name, spell(word)) for word in self._words(name, spell)}
        return {word: by_word[word] for word in EFFORTS if word in by_word}

    def _with(self, name: str, word: str) -> Setting:
        return replace(self._on, variables={**self._on.variables, name: word})

    def _words(self, name: str, spell: Callable[[str], str]) -> list[Effort]:
        knows = partial(self._knows, name, base=self._on)
        known = [word for word in EFFORTS if knows(spell(word))]
        other = self._prompt(self._with(name, _NONSENSE))
        if other is None:
            return known
        if _NONSENSE in other.lower():
            return [word for word in EFFORTS if word in (*_USUAL, *known)]
        if not known:
            return []
        # All other words have one effect, which the template may call by a word of effort.
        meant = self._said(other, self._prompt(self._with(name, spell(known[0]))) or "")
        if meant is not None:
            return [word for word in EFFORTS if word in (meant, *known)]
        return list(EFFORTS)

    def _knows(self, name: str, word: str, base: Setting) -> bool:
        """Return whether a variable's word has another effect than a word that does not exist."""
        prompts = [
            self._prompt(replace(base, variables={**base.variables, name: value})) for value in (word, _NONSENSE)
        ]
        known, unknown = prompts
        if known is None:
            return False
        if unknown is None:
            return True
        for spelled in _SPELLINGS:
            unknown = unknown.replace(spelled(_NONSENSE), spelled(word))
        return known != unknown

    def _said(self, prompt: str, other: str) -> Effort | None:
        words = {word for word in re.findall(r"[a-z]+", prompt.lower()) if word in EFFORTS}
        words -= set(re.findall(r"[a-z]+", other.lower()))
        return cast(Effort, words.pop()) if len(words) == 1 else None


def _effort_of(name: str) -> str | None:
    """Return the effort in the name of a switch, such as `low_effort` (Nemotron 3)."""
    word = name.removesuffix("_effort")
    return word if word in EFFORTS and word != name else None


def _nearest(effort: Effort, accepted: Sequence[Effort]) -> Effort:
    """Return the nearest accepted word; of two the greater one, so that no less is thought."""
    place = EFFORTS.index(effort)
    return min(accepted, key=lambda word: (abs(EFFORTS.index(word) - place), -EFFORTS.index(word)))


def _last_word(setting: Setting) -> str:
    name, value = [*setting.variables.items()][-1]
    return value if isinstance(value, str) else name
