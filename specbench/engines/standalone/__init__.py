"""Scripts for the environments of engines: they import the standard library and the engine, nothing of this project."""
