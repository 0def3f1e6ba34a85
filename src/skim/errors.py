"""The errors Skim raises on purpose. Each message names the thing, the value and the remedy."""

import re
import reprlib
from collections.abc import Mapping


class SkimError(Exception):
    """Base of every error Skim raises on purpose."""


class FieldError(SkimError, ValueError):
    """A value is refused. `fields` names the settings or request fields at fault, the main one first.

    Callers that need a field name read it here, never from the message. A very long message is cut.
    """

    def __init__(self, *message: object, fields: str | tuple[str, ...] = ()) -> None:
        super().__init__(*(cut(part) if isinstance(part, str) else part for part in message))
        self.fields: tuple[str, ...] = (fields,) if isinstance(fields, str) else fields


class ConfigError(FieldError):
    """A setting is missing, malformed or contradicts another one."""


class ModelError(SkimError):
    """A model could not be found, fetched, verified, converted or run."""


class UnsupportedModelError(ModelError):
    """Skim does not serve this kind of model."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}; choose a decoder-only model with causal attention in every layer, such as of the Llama, "
            "Qwen, Mistral, Gemma or gpt-oss families"
        )


class WrittenError(ConfigError):
    """A `ConfigError` whose message names its fields as the user wrote them: a flag, a variable or a file."""


class RequestError(FieldError):
    """One request is malformed or can never be served."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the context window, or can never fit the KV pool."""


class EngineError(SkimError):
    """The engine could not finish a request it had accepted."""


class ParkedError(EngineError):
    """The weights that a request needs are not on the device, because an administrator parked them.

    `returning` is True if they are on their way back.
    """

    def __init__(self, message: str, *, returning: bool = False) -> None:
        super().__init__(message)
        self.returning = returning


class MoveError(EngineError):
    """Weights could not be moved: memory or disk space is too short. They are where they were."""


class BusyError(EngineError):
    """A model is in use, so it cannot be parked now."""


def with_names(message: str, names: Mapping[str, str]) -> str:
    """The message with other names of fields, by the fields' own: flags, variables, fields of a request.

    A name without an underscore may be an ordinary word, so it counts in backticks, and as the subject of the
    message. Quoted values and parts of paths stay as they are.
    """
    if not names:
        return message
    fields = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    certain = "|".join(re.escape(name) for name in names if "_" in name) or "(?!)"
    places = (
        rf"\A(?:{fields})(?={_PREDICATE})",
        _QUOTED,
        rf"(?<=`)(?:{fields})(?=`)",
        rf"(?<![\w./-])(?:{certain})(?![\w/-]|\.\w)",
    )
    return re.sub("|".join(places), lambda match: names.get(match[0], match[0]), message)


_PREDICATE = r"""[:,]|=|\s(?:must|is|are|has|have|needs?|cannot|and|or)\b|\s['"\d-]"""
_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def first_line(error: BaseException) -> str:
    """First line of the error's message, or the name of its class if it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip() if text else type(error).__name__


def missing_package(use: str, package: str, extra: str) -> str:
    """The message that an optional package is not installed: what needs it, and how to install it."""
    return (
        f"{use} needs {package}, which is not installed: pip install {package}, "
        f"or in a clone of Skim: pip install '.[{extra}]'"
    )


SHOWN = 80  # most characters of a value in a message


def shown(value: object, *, quoted: bool = True) -> str:
    """A value for an error message. A long one is cut, and its length is stated.

    Takes no longer for a long value than for a short one. `quoted` is False for names.
    """
    size = _size(value)
    if isinstance(value, (str, bytes)) and len(value) > SHOWN:
        return f"{_text(value[: SHOWN - 20], quoted)[:SHOWN]}... ({size})"
    if isinstance(value, int) and value.bit_length() > 8192:
        return f"a {size}"  # Python refuses to write very long numbers
    text = _SHORT.repr(value) if quoted or not isinstance(value, str) else value
    if len(text) > SHOWN or (size is not None and "..." in text):
        return f"{text[: SHOWN - 20]}..." + (f" ({size})" if size is not None else "")
    return text


def cut(message: str, limit: int = 2000) -> str:
    """A message of at most about `limit` characters; the length of a longer one is stated."""
    return message if len(message) <= limit else f"{message[:limit]}... ({len(message):,} characters)"


def _text(value: object, quoted: bool) -> str:
    return repr(value) if quoted else str(value)


def _size(value: object) -> str | None:
    """The length of a value in words; None if it has none."""
    if isinstance(value, str):
        return f"{len(value):,} characters"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, int):
        return f"whole number of {value.bit_length():,} bits"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{len(value):,} items"
    return None


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 8
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * SHOWN
