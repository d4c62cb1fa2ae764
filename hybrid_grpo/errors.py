"""The one exception a user can cause."""


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the setting and the way out.

    The command line prints the message alone and exits with status 2. Anything else that is raised
    is a fault of this package and keeps its traceback.
    """
