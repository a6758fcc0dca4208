"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Bad input: a message of one line that says what was expected, what came, and where.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """
