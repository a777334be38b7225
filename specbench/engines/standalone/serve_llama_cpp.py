"""llama.cpp's server with given parameters: `python serve_llama_cpp.py PORT JSON`, in an environment with xllamacpp.

It imports nothing of this project: the environment has neither torch nor specbench.
"""

import json
import sys
import threading
from typing import Any

import xllamacpp  # type: ignore[import-not-found] # of another environment


def set_all(parameters: Any, values: dict[str, Any]) -> None:
    """Sets parameters by name; a dictionary sets those of what the name holds."""
    for name, value in values.items():
        if not hasattr(parameters, name):
            raise SystemExit(f"xllamacpp {type(parameters).__name__} has no parameter '{name}'")
        before = getattr(parameters, name)
        if isinstance(value, dict):
            set_all(before, value)
        elif isinstance(before, list) and before and hasattr(type(before[0]), "__members__"):
            setattr(parameters, name, [member(type(before[0]), one) for one in value])
        elif hasattr(type(before), "__members__"):
            setattr(parameters, name, member(type(before), value))
        else:
            setattr(parameters, name, value)


def member(enum: Any, name: object) -> Any:
    """The member of an enumeration whose name ends so: `f16` is GGML_TYPE_F16."""
    wanted = str(name).upper().replace("-", "_")
    for full_name, value in enum.__members__.items():
        if full_name == wanted or full_name.endswith(f"_TYPE_{wanted}"):
            return value
    raise SystemExit(f"{enum.__name__} has no member '{name}'")


def main() -> None:
    """Serves until it is ended."""
    port, values = int(sys.argv[1]), json.loads(sys.argv[2])
    parameters = xllamacpp.CommonParams()
    set_all(parameters, values | {"port": port})
    server = xllamacpp.Server(parameters)
    print(f"serving at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
