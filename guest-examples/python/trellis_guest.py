"""What every guest in Python wants: its arguments, and exceptions that reach the client as errors."""

import traceback

from componentize_py_types import Err
from wit_world.imports import session

# Much more than a client shows of an error; the end says what happened.
N_CHARACTERS_MAX = 4000


class Guest:
    """A guest whose `main` may raise: `SystemExit` says what it has to say, anything else comes with its traceback."""

    def main(self, arguments: list[str]) -> None:
        """What the guest does."""
        raise NotImplementedError

    def run(self) -> None:
        """What the world exports. It fails with the text of an error."""
        try:
            self.main(session.arguments())
        except SystemExit as end:
            if end.code:
                raise Err(str(end.code)) from None
        except Exception as error:
            if isinstance(error, MemoryError):
                # What the frames hold, without which there is no room to say anything.
                traceback.clear_frames(error.__traceback__)
            text = "".join(traceback.format_exception(error))
            raise Err(text[-N_CHARACTERS_MAX:]) from None
