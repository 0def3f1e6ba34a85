"""The errors Skim raises on purpose. Each message names the thing, the value and the remedy."""


class SkimError(Exception):
    """Base of every error Skim raises on purpose."""


class ConfigError(SkimError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class ModelError(SkimError):
    """A model could not be found, fetched, verified, converted or run."""


class RequestError(SkimError, ValueError):
    """One request is malformed or can never be served."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the window, or can never fit the pool."""


class EngineError(SkimError):
    """The engine could not finish a request it had accepted."""
