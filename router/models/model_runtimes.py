"""Model runtimes of a router, by name: which one a request and a worker mean."""

from collections.abc import Collection, Iterator, Sequence

from cluster.errors import Forbidden, Incompatible, InvalidRequest, UnknownModel
from protos import membership_pb2
from router.models.config import AUTO
from router.models.model_runtime import ModelRuntime


class _Adapters:
    """Models that are a LoRA adapter over one of `bases`, as present workers have them."""

    def __init__(self, bases: Sequence[ModelRuntime], names: Collection[str] | None) -> None:
        """Create it; `names` are the visible ones, None: all."""
        self._bases = bases
        self._names = names

    def __iter__(self) -> Iterator[ModelRuntime]:
        names = dict.fromkeys(name for base in self._bases for name in base.fleet.adapters)
        return (adapted for name in names if (adapted := self.get(name)) is not None)

    def get(self, name: str) -> ModelRuntime | None:
        if self._names is not None and name not in self._names:
            return None
        return next((adapted for base in self._bases if (adapted := base.with_adapter(name)) is not None), None)


class ModelRuntimes:
    """Model runtimes of a router, in the order of the configuration."""

    def __init__(self, models: Sequence[ModelRuntime], default_model: str, adapters: "_Adapters | None" = None) -> None:
        """Create them; `default_model` is as in the configuration, already checked.

        `adapters`: the adapters of models that are not among `models`, if they are fewer than all.
        """
        self._models = {model.name: model for model in models}
        self._default = default_model
        self._adapters = _Adapters(models, None) if adapters is None else adapters

    def __iter__(self) -> Iterator[ModelRuntime]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str) -> ModelRuntime:
        """Return the runtime of a known name."""
        return self._models[name]

    def only(self, names: Collection[str] | None) -> "ModelRuntimes":
        """Return the runtimes that a caller with access to `names` sees; None: all."""
        if names is None:
            return self
        default = self._default if self._default in names or self._default == AUTO else ""
        models = [model for model in self if model.name in names]
        return ModelRuntimes(models, default, _Adapters(list(self), frozenset(names)))

    def listed(self) -> list[ModelRuntime]:
        """Return every model that clients may name: those of the configuration, then adapters of present workers."""
        return [*self, *self._adapters]

    def asked_for(self, name: str) -> tuple[ModelRuntime | None, str]:
        """Return the runtime that a request's `model` means, None for AUTO, and why.

        Raises UnknownModel, or InvalidRequest where the name is empty and there are several models.
        """
        if not self._models and not any(self._adapters):
            raise Forbidden("this key may use none of the models that are served here", "model")
        if name == AUTO:
            return None, AUTO
        if name:
            if name not in self._models:
                if (adapted := self._adapters.get(name)) is not None:
                    return adapted, "named by the request"
                served = f"{self._names()} {'is' if len(self) == 1 else 'are'}"
                raise UnknownModel(f"{name!r} is not served here; {served}", "model")
            return self._models[name], "named by the request"
        if self._default:
            why = f"none was named, and {self._default} is the default"
            return self._models.get(self._default), why
        if len(self) > 1:
            raise InvalidRequest(
                "model", f"is empty, but several models are served: name one of {self._names()}, or {AUTO!r}"
            )
        return next(iter(self)), "the only one served"

    def of_worker(self, hello: membership_pb2.Hello) -> ModelRuntime:
        """Return the runtime that a worker serves.

        The worker has its config and tokenizer, or its name and another revision of it. Among several with one config
        and tokenizer the name decides. Raises Incompatible.
        """
        equal = [model for model in self if model.config_fingerprint == hello.config_fingerprint]
        if len(equal) > 1:
            equal = [model for model in equal if hello.model in (model.name, model.model_dir.name)]
        if equal:
            return equal[0]
        named = [model for model in self if hello.model in (model.name, model.model_dir.name)]
        if hello.revision and len(named) == 1:
            return named[0]
        alike = [repr(model.name) for model in self if model.config_fingerprint == hello.config_fingerprint]
        worker = f"worker {hello.worker_id} serves {hello.model!r}"
        if alike:
            reason = f"its config and tokenizer match {' and '.join(alike)}, but its name matches neither"
            raise Incompatible(f"{worker}: {reason}", "model")
        whose = f"this router's {self._names()}" if len(self) == 1 else f"those of all served here: {self._names()}"
        reason = f"{worker}, whose name and config or tokenizer differ from {whose}"
        raise Incompatible(f"{reason}; a revision of one needs its name (the worker's setting model_name)", "model")

    def _names(self) -> str:
        return ", ".join(map(repr, self._models))
