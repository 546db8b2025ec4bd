import pytest

from flowdp.collective import mean as mean_module
from tests.collective.fake_world import FakeWorld, device_mean
from tests.fakes import FakeStream


@pytest.mark.parametrize(
    ("cards", "workers"), [((0, 0, 0), {0}), ((0, 1, 1), {0, 1}), ((1, 0, 1), {0, 1}), ((2, 0, 1), {0, 1, 2})]
)
def test_one_rank_of_each_card_works_for_all_on_it(cards, workers):
    world = FakeWorld(device_mean, cards)
    world.hold([1, 2, 3], drift=True)
    marked = {name for name, verb, _ in world.cuda.log if verb == "records"}
    working = {rank for rank, lane in enumerate(world.lanes) if lane.comm.name in marked}
    assert working == workers


def current_streams(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> list[list[FakeStream]]:
    """For each part of a round, the streams that are current while it is enqueued."""
    stacks: list[list[FakeStream]] = []
    real = mean_module.BlockMean.reduce

    def reduce(self, samples, **options):
        stacks.append(list(world.cuda._local.stack))
        return real(self, samples, **options)

    with monkeypatch.context() as patch:
        patch.setattr(mean_module.BlockMean, "reduce", reduce)
        ranks = range(len(world.lanes))
        world.read(world.hold([rank + 1 for rank in ranks]))
    return stacks


def test_each_part_has_streams_of_its_own_on_the_other_cards(monkeypatch):
    """Torch orders a copy between two cards with the current streams of both: with one stream for two parts,
    the second part would wait for the first.
    """
    world = FakeWorld(device_mean, (0, 1, 2))
    stacks = current_streams(world, monkeypatch)
    assert [stack[-1] for stack in stacks] == [lane.comm for lane in world.lanes]
    # The last arrival's compute stream lies below those that the mean has entered: one per card.
    used = [stack[-3:] for stack in stacks]
    for at, stack in enumerate(used):
        assert sorted(stream.device.index for stream in stack) == [0, 1, 2]
        assert stack[-1].device.index == at
    assert len({id(stream) for stack in used for stream in stack}) == 9
    others = {stream for stack in used for stream in stack[:-1]}
    assert {stream.priority for stream in others} == {-1}
    lanes = [stream for lane in world.lanes for stream in (lane.compute, lane.comm, lane.copy)]
    assert others.isdisjoint(lanes)
