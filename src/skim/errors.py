"""The errors Skim raises on purpose. Each message names the thing, the value and the remedy."""


class SkimError(Exception):
    """Base of every error Skim raises on purpose."""


class ConfigError(SkimError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class ModelError(SkimError):
    """A model could not be found, fetched, verified, converted or run."""


class UnsupportedModelError(ModelError):
    """A model of a kind that Skim does not serve."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}; choose a decoder-only model with causal attention in every layer, such as of the Llama, "
            "Qwen, Mistral, Gemma or gpt-oss families"
        )


class RequestError(SkimError, ValueError):
    """One request is malformed or can never be served."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the window, or can never fit the pool."""


class EngineError(SkimError):
    """The engine could not finish a request it had accepted."""
