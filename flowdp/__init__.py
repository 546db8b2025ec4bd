"""Train one PyTorch model on all the devices you own, from one Python process.

::

    import flowdp, torch, torch.nn.functional as F

    run = flowdp.Trainer(
        model=model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=(images, labels), batch_size=64, epochs=10, devices=["cpu", "cpu"],
    ).start()
    for epoch in run.metrics():
        print(epoch)
    state = run.join()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowdp.api import *  # noqa: F403 - the names are there

    __version__: str
else:  # a type checker would take any name for one of a module with this function

    def __getattr__(name: str) -> object:
        """A public name. The first use of one imports all, so that `import flowdp` alone costs nothing."""
        if name == "__version__":
            return import_module("importlib.metadata").version("flowdp")
        value = globals()[name] = getattr(import_module("flowdp.api"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("flowdp.api").__all__})
