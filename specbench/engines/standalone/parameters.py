"""Sets an engine's parameters by name; imports the standard library alone."""

from typing import Any


def set_all(parameters: Any, values: dict[str, Any]) -> Any:
    """Sets parameters by name, and returns their object; a dictionary sets those of what the name holds.

    Exits if a name is unknown.
    """
    for name, value in values.items():
        if not hasattr(parameters, name):
            raise SystemExit(f"{type(parameters).__name__} has no parameter '{name}'")
        before = getattr(parameters, name)
        if isinstance(value, dict):
            set_all(before, value)
        elif isinstance(before, list) and before and hasattr(type(before[0]), "__members__"):
            setattr(parameters, name, [member(type(before[0]), one) for one in value])
        elif hasattr(type(before), "__members__"):
            setattr(parameters, name, member(type(before), value))
        else:
            setattr(parameters, name, value)
    return parameters


def member(enum: Any, name: object) -> Any:
    """The member of an enumeration whose name ends so: `f16` is GGML_TYPE_F16."""
    wanted = str(name).upper().replace("-", "_")
    for full_name, value in enum.__members__.items():
        if full_name == wanted or full_name.endswith(f"_TYPE_{wanted}"):
            return value
    raise SystemExit(f"{enum.__name__} has no member '{name}'")
