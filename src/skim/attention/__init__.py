"""How memory is read: the transformers hook, the step's metadata and the torch backend."""
