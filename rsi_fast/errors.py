"""The one exception that ends a command with a message for a person, not a traceback."""


class UserError(Exception):
    """Something the user can mend. The message names the thing, what was expected and what to do next."""
