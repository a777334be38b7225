"""llama.cpp's server with given parameters: `python serve_llama_cpp.py PORT JSON`, in an environment with xllamacpp.

It imports nothing of this project but the module beside it: the environment has neither torch nor specbench.
"""

import json
import sys
import threading

import xllamacpp  # type: ignore[import-not-found] # of another environment
from parameters import set_all  # type: ignore[import-not-found] # beside it


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
