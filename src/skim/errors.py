"""The errors Skim raises on purpose. Each message names the thing, the value and the remedy."""


class SkimError(Exception):
    """Base of every error Skim raises on purpose."""


class FieldError(SkimError, ValueError):
    """A value is refused. `fields` names the settings or request fields at fault, the main one first.

    Callers that need a field name read it here, never from the message.
    """

    def __init__(self, *message: object, fields: str | tuple[str, ...] = ()) -> None:
        super().__init__(*message)
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


class RequestError(FieldError):
    """One request is malformed or can never be served."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the context window, or can never fit the KV pool."""


class EngineError(SkimError):
    """The engine could not finish a request it had accepted."""


def first_line(error: BaseException) -> str:
    """First line of the error's message, or the name of its class if it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip() if text else type(error).__name__
