"""Errors on their way from one machine to another."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flowdp.errors import FlowdpError
from flowdp.policy.formats import format_error

__all__ = ["RemoteError", "origin_of", "sent_error"]


class _RemoteTracebackError(Exception):
    """Traceback of another machine, as the cause of the error that is raised here.

    Attributes:
        machine: The machine that has sent it.
    """

    def __init__(self, trace: str, machine: int) -> None:
        super().__init__(f"\n\n{trace}")
        self.machine = machine


def origin_of(error: BaseException) -> int | None:
    """The machine from which an error came; None: this one."""
    cause = error.__cause__
    return cause.machine if isinstance(cause, _RemoteTracebackError) else None


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error of another machine.

    Attributes:
        content: The error's class and attributes, pickled; None: they cannot be.
        text: The error as text, with the name of its machine.
        trace: Its traceback, as text.
    """

    content: bytes | None
    text: str
    trace: str

    def error(self, machine: int) -> BaseException:
        """An error of the same class and attributes; a `FlowdpError` where these are not known here.

        Args:
            machine: The machine that has sent it.
        """
        made: BaseException = FlowdpError(self.text)
        if self.content is not None:
            with suppress(
                Exception
            ):  # a class of the user's, or an attribute, that this machine does not have
                kind, attributes = pickle.loads(self.content)
                known = kind.__new__(kind, self.text)
                known.__dict__.update(attributes)
                made = known
        made.__cause__ = _RemoteTracebackError(self.trace, machine)
        return made


def sent_error(error: BaseException, machine: str) -> RemoteError:
    """Describe an error for another machine.

    Args:
        error: The error; the text of one that comes from another machine names that one.
        machine: Name of this machine.
    """
    is_own = origin_of(error) is None
    text = f"{machine}: {error}" if is_own else str(error)
    trace = "".join(traceback.format_exception(error))
    content: bytes | None = None
    if isinstance(error, FlowdpError):
        attributes: dict[str, Any] = {
            name: value for name, value in vars(error).items() if name != "__notes__"
        }
        try:
            content = pickle.dumps((type(error), attributes))
        except Exception:  # an attribute of the user's
            content = None
    elif is_own:
        text = f"{machine}: {format_error(error)}"
    return RemoteError(content, text, trace)
