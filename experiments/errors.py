"""The error of studies: bad input, told in one sentence that names the field, the value and the remedy."""


class InputError(ValueError):
    """What a user can put right. The command line prints the sentence and ends with exit code 2."""
