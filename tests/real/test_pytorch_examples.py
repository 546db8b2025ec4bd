"""Training loops like those of pytorch/examples: mnist, mnist_rnn, vae, siamese_network, dcgan and others.

Rewritten, small, on random data, and without dropout, for which each device draws its own numbers. The lines
that flowdp requires end in `# changed`; docs/moving.md has their number.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from flowdp import FlowdpError
from tests.real.ways import (
    SHARES,
    Script,
    Shares,
    Weights,
    as_written,
    assert_same,
    check,
    spreading,
    weights,
)

Spread = Callable[..., Any]


def images(samples: int, size: int = 12, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 1, size, size), torch.randint(classes, (samples,)))


class Digits(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def mnist(spread: Spread) -> Weights:
    train, test = DataLoader(images(50), batch_size=16, shuffle=True), DataLoader(images(20), batch_size=20)
    model = Digits()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = spread(model, optimizer)  # changed
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(2):
        model.train()
        for data, target in train:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(sum(F.nll_loss(model(x), y, reduction="sum") for x, y in test))
        scheduler.step()
    return {**weights(model), "losses": torch.stack(losses)}


class Rows(nn.Module):
    """An LSTM over the rows of an image, followed by BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(input_size=12, hidden_size=8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        output, _ = self.rnn(image.reshape(-1, 12, 12))
        return F.log_softmax(self.fc(F.relu(self.norm(output[:, -1, :]))), dim=1)


def mnist_rnn(spread: Spread) -> Weights:
    train, test = DataLoader(images(50), batch_size=16, shuffle=True), DataLoader(images(20), batch_size=20)
    model = Rows()
    if spread is not as_written:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # changed
    optimizer = optim.Adadelta(model.parameters(), lr=0.1)
    model = spread(model, optimizer)  # changed
    for _ in range(2):
        model.train()
        for data, target in train:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in test)
    return {**weights(model), "right": torch.tensor(right)}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(144, 16)
        self.fc21, self.fc22 = nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 144)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 144)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def vae(spread: Spread) -> Weights:
    loader = DataLoader(images(40), batch_size=16, shuffle=True)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    model = spread(model, optimizer)  # changed
    model.train()
    for _ in range(2):
        for data, _ in loader:
            data = torch.sigmoid(data)
            optimizer.zero_grad()
            found, mu, logvar = model(data)
            loss = F.binary_cross_entropy(found, data.view(-1, 144), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        z = torch.linspace(-1, 1, 24).view(6, 4)
        if spread is as_written:
            sample = model.decode(z)
        else:
            sample = model.call("decode", z)  # changed
    return {**weights(model), "sample": sample}


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 5, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.fc = nn.Sequential(nn.Linear(128, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = [self.tower(image).flatten(1) for image in (one, other)]
        return torch.sigmoid(self.fc(torch.cat(both, 1)))


def siamese_network(spread: Spread) -> Weights:
    pairs = TensorDataset(torch.randn(40, 1, 12, 12), torch.randn(40, 1, 12, 12), torch.rand(40).round())
    model = Siamese()
    if spread is not as_written:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # changed
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = spread(model, optimizer)  # changed
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    model.train()
    for _ in range(2):
        for one, other, target in DataLoader(pairs, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(one, other).squeeze(), target)
            loss.backward()
            optimizer.step()
        scheduler.step()
    return weights(model)


def dcgan(spread: Spread) -> Weights:
    generator: Any = nn.Sequential(
        nn.ConvTranspose2d(8, 4, 3, 1, 0, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )

    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 4, 4, 2, 1, bias=False),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(4, 4, 3, 1, 1, bias=False),
                nn.BatchNorm2d(4),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(4, 1, 3, 1, 0, bias=False),
                nn.Sigmoid(),
            )

        def forward(self, image: Tensor) -> Tensor:
            return self.main(image).view(-1, 1).squeeze(1)

    discriminator: Any = Discriminator()
    if spread is not as_written:
        generator = nn.SyncBatchNorm.convert_sync_batchnorm(generator)  # changed
        discriminator = nn.SyncBatchNorm.convert_sync_batchnorm(discriminator)  # changed
    steps_d = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    steps_g = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator = spread(generator, steps_g)  # changed
    discriminator = spread(discriminator, steps_d)  # changed
    for real, _ in DataLoader(images(36, size=6), batch_size=12, shuffle=True):
        label = torch.ones(len(real))
        discriminator.zero_grad()
        F.binary_cross_entropy(discriminator(real), label).backward()
        fake = generator(torch.randn(len(real), 8, 1, 1))
        F.binary_cross_entropy(discriminator(fake.detach()), torch.zeros_like(label)).backward()
        steps_d.step()
        generator.zero_grad()
        F.binary_cross_entropy(discriminator(fake), label).backward()
        steps_g.step()
    return weights(generator, discriminator)


def super_resolution(spread: Spread) -> Weights:
    net: Any = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    optimizer = optim.Adam(net.parameters(), lr=1e-2)
    net = spread(net, optimizer)  # changed
    data = TensorDataset(torch.randn(20, 1, 6, 6), torch.randn(20, 1, 12, 12))
    for small, large in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(net(small), large).backward()
        optimizer.step()
    return weights(net)


def regression(spread: Spread) -> Weights:
    wanted, offset = torch.randn(4, 1) * 5, torch.randn(1) * 5
    fc: Any = nn.Linear(4, 1)
    fc = spread(fc)  # changed
    for _ in range(6):
        x = torch.randn(32).unsqueeze(1) ** torch.arange(1, 5)
        fc.zero_grad()
        loss = F.smooth_l1_loss(fc(x), x.mm(wanted) + offset)
        loss.backward()
        for param in fc.parameters():
            param.data.add_(-0.1 * param.grad)
    return weights(fc)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, input: Tensor, future: int = 0) -> Tensor:
        outputs = []
        first = second = (input.new_zeros(len(input), 6), input.new_zeros(len(input), 6))
        for now in input.split(1, dim=1):
            first = self.lstm1(now, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        for _ in range(future):
            first = self.lstm1(outputs[-1], first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def time_sequence_prediction(spread: Spread) -> Weights:
    phase = torch.rand(9, 1) * 6
    waves = torch.sin(phase + torch.arange(12.0) / 3)
    seq: Any = Waves()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    seq = spread(seq, optimizer)  # changed
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(seq(waves[3:, :-1]), waves[3:, 1:])
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            seen = seq(waves[:3, :-1], future=5)
    return {**weights(seq), "seen": seen}


class Language(nn.Module):
    """Time-major, like torch's recurrent layers; the output has a row per time and sample."""

    def __init__(self, tokens: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Embedding(tokens, 6)
        self.rnn = nn.LSTM(6, 6, layers)
        self.decoder = nn.Linear(6, tokens)
        self.decoder.weight = self.encoder.weight
        self.layers = layers

    def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 11), dim=1), hidden

    def init_hidden(self, samples: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(self.layers, samples, 6), weight.new_zeros(self.layers, samples, 6)


def join_language(outputs: Any, sizes: Any) -> Any:  # changed
    rows = torch.cat(
        [rows.view(-1, n, 11) for (rows, _), n in zip(outputs, sizes, strict=True)], 1
    )  # changed
    hidden = [torch.cat(states, 1) for states in zip(*(h for _, h in outputs), strict=True)]  # changed
    return rows.view(-1, 11), tuple(hidden)  # changed


def word_language_model(spread: Spread) -> Weights:
    train = torch.randint(11, (22, 8))
    model = Language()
    hidden = model.init_hidden(8)
    model = spread(model, dim=1, join=join_language)  # changed
    criterion = nn.NLLLoss()
    model.train()
    for start in range(0, 21, 7):
        data, targets = train[start : start + 7], train[start + 1 : start + 8].view(-1)
        model.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        output, hidden = model(data, hidden)
        criterion(output, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-2.0)
    return {**weights(model), "hidden": hidden[0].detach()}


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
        self.out = nn.Linear(8, 9)

    def forward(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor,
        tgt_mask: Tensor,
        src_padding_mask: Tensor,
        tgt_padding_mask: Tensor,
        memory_key_padding_mask: Tensor,
    ) -> Tensor:
        outs = self.transformer(
            self.source(src),
            self.target(trg),
            src_mask,
            tgt_mask,
            None,
            src_padding_mask,
            tgt_padding_mask,
            memory_key_padding_mask,
        )
        return self.out(outs)


DIMS = {
    "src": 1,
    "trg": 1,
    "src_padding_mask": 0,
    "tgt_padding_mask": 0,
    "memory_key_padding_mask": 0,
}


def language_translation(spread: Spread) -> Weights:
    model: Any = Translator()
    optimizer = optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
    model = spread(model, optimizer, dim=DIMS)  # changed
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    for _ in range(3):
        src, tgt = torch.randint(1, 9, (6, 10)), torch.randint(1, 9, (7, 10))
        src[4:, ::2] = 0
        tgt[5:, ::3] = 0
        given = tgt[:-1]
        src_mask = torch.zeros(6, 6, dtype=torch.bool)
        tgt_mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        pads = (src == 0).T, (given == 0).T
        logits = model(src, given, src_mask, tgt_mask, *pads, pads[0])
        optimizer.zero_grad()
        criterion(logits.reshape(-1, 9), tgt[1:].reshape(-1)).backward()
        optimizer.step()
    return weights(model)


SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(4, 8)
        self.action_head, self.value_head = nn.Linear(8, 2), nn.Linear(8, 1)
        self.saved_actions: list[SavedAction] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def actor_critic(spread: Spread) -> Weights:
    model: Any = Policy()
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    model = spread(model, optimizer)  # changed
    for _ in range(3):
        state = torch.randn(4)
        for _ in range(5):
            if spread is as_written:
                probs, value = model(state)
            else:
                probs, value = model.module(state)  # changed
            chosen = Categorical(probs)
            action = chosen.sample()
            model.saved_actions.append(SavedAction(chosen.log_prob(action), value))
            state = state.roll(1) + (0.1 if action else -0.1)
            model.rewards.append(float(state[0]))
        total, returns = 0.0, []
        for reward in model.rewards[::-1]:
            total = reward + 0.99 * total
            returns.insert(0, total)
        losses = [
            -saved.log_prob * (wanted - saved.value.item())
            + F.smooth_l1_loss(saved.value, torch.tensor([wanted]))
            for saved, wanted in zip(model.saved_actions, returns, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        del model.rewards[:]
        del model.saved_actions[:]
    return weights(model)


def fast_neural_style(spread: Spread) -> Weights:
    transformer: Any = nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
    )
    vgg: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    vgg.requires_grad_(False)
    optimizer = optim.Adam(transformer.parameters(), 1e-2)
    transformer = spread(transformer, optimizer)  # changed
    vgg = spread(vgg)  # changed
    style = vgg(torch.randn(1, 3, 8, 8)).flatten(2)
    wanted = style @ style.mT
    for (x,) in DataLoader(TensorDataset(torch.randn(20, 3, 8, 8)), batch_size=8):
        optimizer.zero_grad()
        y = transformer(x)
        features, content = vgg(y), vgg(x)
        gram = features.flatten(2) @ features.flatten(2).mT
        loss = F.mse_loss(features, content) + 1e-3 * F.mse_loss(gram, wanted.expand(len(x), -1, -1))
        loss.backward()
        optimizer.step()
    return weights(transformer, vgg)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        return F.log_softmax(adjacency @ (features @ self.weight), dim=1)


SCRIPTS: list[Script] = [
    mnist,
    mnist_rnn,
    vae,
    siamese_network,
    dcgan,
    super_resolution,
    regression,
    time_sequence_prediction,
    word_language_model,
    language_translation,
    actor_critic,
    fast_neural_style,
]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # by torch 2.8's LBFGS
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("shares", SHARES, ids=len)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_script_trains_the_same_weights(
    script: Script, shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is vae:  # otherwise each device would draw its own
        monkeypatch.setattr(torch, "randn_like", lambda like: like.new_full(like.shape, 0.3))
    check(script, shares)


def test_a_graph_is_no_batch_of_nodes() -> None:
    """gat and gcn pass all nodes at once: the first call refuses to split them."""
    nodes, edges = torch.randn(8, 5), torch.rand(8, 8)
    with spreading((0.5, 0.5)) as spread, pytest.raises(FlowdpError):
        spread(GraphNet())(nodes, edges)


def test_time_major_without_dim_is_refused() -> None:
    with spreading((0.5, 0.5)) as spread:
        model = spread(Language())
        with pytest.raises(FlowdpError, match="dim="):
            model(torch.randint(11, (6, 8)), model.module.init_hidden(8))


def test_layers_in_a_plain_list_are_no_parameters() -> None:
    """mnist_forward_forward keeps its layers in a list, so an optimizer of that model would not find them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    with spreading((0.5, 0.5)) as spread, pytest.raises(FlowdpError, match="ModuleList"):
        spread(Net())(torch.randn(4, 4))


# ---------------------------------------------------------------------- the same by a Trainer
def by_trainer(
    model: nn.Module, optimizer: Any, loss: Any, dataset: Any, devices: int, **options: Any
) -> Weights:
    run = flowdp.Trainer(
        model=model,
        optimizer=optimizer,
        loss=loss,
        dataset=dataset,
        per_device_batch_size=4,
        batch_size=16,
        epochs=2,
        reading=flowdp.ReadingOptions(shuffle=False),
        policy="exact",
        devices=["cpu"] * devices,
        progress=False,
        **options,
    ).start()
    run.join()
    return weights(model)


def by_hand(model: nn.Module, optimizer: Any, loss: Any, dataset: Any) -> Weights:
    steps = optimizer(list(model.parameters()))
    for _ in range(2):
        for batch in DataLoader(dataset, batch_size=16):
            steps.zero_grad()
            loss(model, batch).backward()
            steps.step()
    return weights(model)


TRAINER: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], Any, Any]] = {
    "mnist": (
        Digits,
        lambda: images(40),
        lambda params: optim.Adadelta(params, lr=1.0),
        lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
    ),
    "super_resolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
        ),
        lambda: TensorDataset(torch.randn(40, 1, 6, 6), torch.randn(40, 1, 12, 12)),
        lambda params: optim.Adam(params, lr=1e-2),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    ),
    "regression": (
        lambda: nn.Linear(4, 1),
        lambda: TensorDataset(torch.randn(40, 4), torch.randn(40, 1)),
        lambda params: optim.SGD(params, lr=0.1),
        lambda model, batch: F.smooth_l1_loss(model(batch[0]), batch[1]),
    ),
    "time_sequence_prediction": (
        Waves,
        lambda: TensorDataset(torch.sin(torch.rand(40, 1) * 6 + torch.arange(12.0) / 3)),
        lambda params: optim.Adam(params, lr=1e-2),
        lambda model, batch: F.mse_loss(model(batch[0][:, :-1]), batch[0][:, 1:]),
    ),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", TRAINER)
def test_a_trainer_trains_the_same_weights(name: str, devices: int) -> None:
    build, data, optimizer, loss = TRAINER[name]
    torch.manual_seed(0)
    dataset = data()
    torch.manual_seed(1)
    expected = by_hand(build(), optimizer, loss, dataset)
    torch.manual_seed(1)
    found = by_trainer(build(), optimizer, loss, dataset, devices)
    assert_same(found, expected)
