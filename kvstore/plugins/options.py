"""Reads an options dataclass as the schema of a config section."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kvstore.types import Unit

Form = Literal["str", "int", "float", "bool", "bytes", "seconds", "choice", "strings"]

_PLAIN: Final[dict[Any, Form]] = {str: "str", int: "int", float: "float", bool: "bool", tuple[str, ...]: "strings"}
_NO_UNIT: Final[tuple[type[Any] | None, Form]] = (None, "str")
_UNITS: Final[dict[str, tuple[type[Any] | None, Form]]] = {"bytes": (int, "bytes"), "seconds": (float, "seconds")}

SUPPORTED: Final = (
    "str, int, float, bool, ByteSize, Seconds, Literal of strings, Enum of strings, tuple[str, ...], "
    "or one of them | None"
)


@dataclass(frozen=True, slots=True)
class OptionField:
    """One key of a config section.

    Attributes:
        name: The key.
        form: How its value is written.
        doc: One or two sentences.
        choices: Every allowed text of a ``choice``.
        convert: Turns an allowed text into the field's value, for enums.
        optional: Whether None is a value.
        required: Whether the config must name it.
        secret: Whether messages must not show its value.
        default: Its value when the config does not name it; None when required.
    """

    name: str
    form: Form
    doc: str = ""
    choices: tuple[str, ...] = ()
    convert: Callable[[str], Any] = str
    optional: bool = False
    required: bool = False
    secret: bool = False
    default: Any = None


def option_fields(options: type[Any], *, skip: Collection[str] = ()) -> tuple[OptionField, ...]:
    """Return the keys that ``options`` declares, in order.

    Args:
        options: A dataclass; fields with ``init=False`` are not keys.
        skip: Names of fields that are not keys either.

    Raises:
        TypeError: An annotation cannot be resolved, or config has no way to write such a value.
    """
    try:
        hints = get_type_hints(options, include_extras=True)
    except NameError as e:
        msg = f"the annotations of {options.__name__} cannot be resolved: {e}; import their types at module level"
        raise TypeError(msg) from e
    keys = [field for field in dataclasses.fields(options) if field.init and field.name not in skip]
    return tuple(_option_field(field, hints[field.name]) for field in keys)


def _option_field(field: dataclasses.Field[Any], annotation: Any) -> OptionField:
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        optional = len(members) < len(get_args(annotation))
        annotation = members[0] if len(members) == 1 else annotation
    form, choices, convert = _form(field.name, annotation)
    return OptionField(
        name=field.name,
        form=form,
        doc=str(field.metadata.get("doc", "")),
        choices=choices,
        convert=convert,
        optional=optional,
        required=field.default is MISSING and field.default_factory is MISSING,
        secret=bool(field.metadata.get("secret", False)),
        default=_default(field),
    )


def _form(name: str, annotation: Any) -> tuple[Form, tuple[str, ...], Callable[[str], Any]]:
    if annotation in _PLAIN:
        return _PLAIN[annotation], (), str
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        units = [extra.kind for extra in arguments[1:] if isinstance(extra, Unit)]
        number, form = _UNITS.get(units[0], _NO_UNIT) if len(units) == 1 else _NO_UNIT
        if arguments[0] is number:
            return form, (), str
    if get_origin(annotation) is Literal and all(isinstance(choice, str) for choice in arguments):
        return "choice", arguments, str
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
        if all(isinstance(value, str) for value in values):
            return "choice", tuple(values), annotation
    msg = f"option {name!r} has the type {annotation!r}, which config cannot express; use {SUPPORTED}"
    raise TypeError(msg)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
