"""A run in a notebook: a display that updates in place, and a dashboard with buttons."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowdp.errors import OptionError
from flowdp.validators import check_installed

if TYPE_CHECKING:
    from ipywidgets import Widget

__all__ = ["display_live", "is_in_notebook", "run_dashboard"]

log = logging.getLogger("flowdp")

EVERY_S = 0.5
"""Time between two drawings."""


def is_in_notebook() -> bool:
    """Whether cells of a notebook run in this process. A script may have imported IPython and its kernel."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


def display_live(html: Callable[[], str], text: Callable[[], str], wait: Callable[[float], bool]) -> None:
    """Display a run in the cell under way, and draw it anew until it is over; in a terminal, once as text.

    Args:
        html: Returns the run as HTML.
        text: Returns it as one line.
        wait: Waits for its end, so many seconds at most; returns whether it is over.

    Raises:
        ImportError: IPython is not installed.
    """
    from IPython.display import display

    def bundle() -> dict[str, str]:
        return {"text/plain": text(), "text/html": html()}

    handle = display(bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    if is_in_notebook() and handle is not None and not wait(0.0):
        _redraw(lambda: handle.update(bundle(), raw=True), wait)


def run_dashboard(run: Any, html: Callable[[], str], wait: Callable[[float], bool], lr: float) -> Widget:
    """Widgets that show a run and steer it: pause, stop, learning rate.

    Args:
        run: The `Run`: `pause`, `unpause`, `stop` and `set_lr` of it are called.
        html: Returns it as HTML.
        wait: Waits for its end, so many seconds at most; returns whether it is over.
        lr: Learning rate now.

    Raises:
        OptionError: ipywidgets is not installed.
    """
    check_installed("a dashboard", "ipywidgets", "notebook")
    import ipywidgets

    view = ipywidgets.HTML(html())
    pause = ipywidgets.ToggleButton(description="Pause", icon="pause")
    stop = ipywidgets.Button(description="Stop", icon="stop", button_style="warning")
    rate = ipywidgets.FloatText(lr, description="lr", step=1e-4, layout={"width": "180px"})
    apply = ipywidgets.Button(description="Set lr")
    said = ipywidgets.Label()

    def on_pause(change: Any) -> None:
        (run.pause if change["new"] else run.unpause)()
        said.value = "pausing after this round" if change["new"] else ""

    def on_stop(_: Any) -> None:
        run.stop()
        said.value = "stopping after this round"

    def on_rate(_: Any) -> None:
        try:
            run.set_lr(rate.value)
            said.value = f"learning rate {rate.value:g} from the next round on"
        except OptionError as error:
            said.value = str(error)

    pause.observe(on_pause, names="value")
    stop.on_click(on_stop)
    apply.on_click(on_rate)
    controls = [pause, stop, rate, apply]

    def draw() -> None:
        view.value = html()
        if wait(0.0):
            said.value = ""
            for control in controls:
                control.disabled = True

    _redraw(draw, wait)
    return ipywidgets.VBox([ipywidgets.HBox([*controls, said]), view])


def _redraw(draw: Callable[[], None], wait: Callable[[float], bool]) -> None:
    """Draw twice a second on a thread, and once more when the run is over."""

    def body() -> None:
        is_over = False
        while not is_over:
            is_over = wait(EVERY_S)
            try:
                draw()
            except Exception:  # a kernel that shuts down, a page that is closed
                log.debug("a run cannot be drawn any more", exc_info=True)
                return

    threading.Thread(target=body, name="flowdp-display", daemon=True).start()
