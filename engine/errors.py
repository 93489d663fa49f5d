"""Why an engine cannot start."""


class EngineStartError(Exception):
    """`field` of the configuration is at fault, for `reason`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ModelRefused(EngineStartError):
    """The model cannot be served correctly, so it is not served."""

    def __init__(self, reason: str) -> None:
        super().__init__("model", reason)
