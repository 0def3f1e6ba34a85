"""The engine: scheduler, step loop and the life of a request."""
