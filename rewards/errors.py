"""The one exception that means "the user can fix this": the command line prints its sentence and exits with
status 2."""


class UserError(ValueError):
    """A mistake in what was handed in. Its message is one sentence that names the file, line or key, says what was
    expected and what to do."""
