"""Activity of a run's threads as text and as Python stacks, for a stalled run and for `Run.dump()`."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence

from flowdp.threads.gate import Waiting

__all__ = ["describe_rank", "describe_run", "stacks"]


def stacks(threads: Iterable[threading.Thread]) -> dict[str, str]:
    """The Python stack of each thread that is alive, by its name: outermost call first.

    Threads:
        Any. The threads run on meanwhile, so each stack is of a moment of its own.
    """
    wanted = list(threads)
    idents = {thread.ident for thread in wanted}
    # Frames keep their locals alive. No name may hold them here: this frame is one of them, and would keep
    # them all until the garbage collector comes.
    texts = {
        ident: "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident in idents
    }
    found: dict[str, str] = {}
    for thread in wanted:
        text = texts.get(thread.ident or -1)
        if text is not None and thread.is_alive():  # an ident is given again once its thread has ended
            found[thread.name if thread.name not in found else f"{thread.name} ({thread.ident})"] = text
    return found


def describe_rank(
    *,
    has_left: bool = False,
    waiting: Waiting | None = None,
    task: str | None = None,
    awaited: tuple[int, int] | None = None,
    step: tuple[int, int] | None = None,
    idle: str | None = None,
) -> str:
    """Description of a rank's activity: the first of these facts that is given.

    Args:
        has_left: Its thread has ended.
        waiting: Its wait in the gate.
        task: Its barrier task: "evaluates after epoch 2".
        awaited: Epoch and number of the batch that it needs and that was not read yet.
        step: Epoch and first batch of the step that it is in.
        idle: Why it has no batches.
    """
    if has_left:
        return "has left"
    if waiting is not None:
        return _at_gate(waiting)
    if task is not None:
        return task
    if awaited is not None:
        return f"waiting for data: batch {awaited[1]} of epoch {awaited[0]}"
    if step is not None:
        return f"in a step (epoch {step[0]}, batch {step[1]})"
    return "idle" if idle is None else f"idle: {idle}"


def describe_run(
    headline: str,
    ranks: Sequence[str],
    stacks: Mapping[str, str],
    events: Sequence[str],
    readers: Sequence[str] = (),
) -> str:
    """Report of a run at one moment, as text of many lines.

    Args:
        headline: The first line.
        ranks: Activity of each rank. Shape (world_size,).
        stacks: Python stack of each thread by its name.
        events: The last events of the coordinator, oldest first.
        readers: Waits of the dataset readers.
    """
    parts = [headline, *(f"  rank {rank}: {doing}" for rank, doing in enumerate(ranks))]
    parts += [f"  reader: {doing}" for doing in readers]
    parts += [f"\n{name} is here:\n{stack.rstrip()}" for name, stack in stacks.items()]
    if events:
        parts += ["\nThe last events:", *(f"  {event}" for event in events)]
    return "\n".join(parts)


def _at_gate(waiting: Waiting) -> str:
    where = f"at the gate in round {waiting.round}"
    if not waiting.missing:
        return f"{where}, " + (
            "whose averaging is being launched" if waiting.decided else "waiting for other machines"
        )
    plural = "s" if len(waiting.missing) > 1 else ""
    who = f"rank{plural} {', '.join(map(str, waiting.missing))}"
    return f"{where}, waiting for {who}" + (" to finish the averaging" if waiting.decided else "")
