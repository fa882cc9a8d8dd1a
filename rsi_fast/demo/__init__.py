"""The demo's tasks, demonstrations and base checkpoint. Nothing else of the package imports this."""
