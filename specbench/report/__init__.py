"""Reports: views of run folders. Nothing here loads a model or measures."""
