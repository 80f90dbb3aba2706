"""Random chains of layers and devices, and their best cuts by trying all."""

import itertools
import random

from colossax.pipeline.cuts import LayerCost, Link, StageDevice


def chain(rng, *, most_layers, most_devices):
    """(layers, devices, links between any two, settings) of a random case."""
    count = rng.randint(1, most_devices)
    layers = [layer(rng) for _ in range(rng.randint(count, most_layers))]
    memory = rng.choice([80, 80, 200])
    devices = [
        StageDevice(
            speed=rng.choice([0.5, 1.0, 2.0, rng.uniform(0.3, 3)]),
            memory_bytes=rng.choice([None, rng.randint(10, memory)]),
        )
        for _ in range(count)
    ]
    links = [[Link()] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        speed = rng.choice([None, 5.0, 50.0, rng.uniform(1, 100)])
        links[a][b] = links[b][a] = Link(bytes_per_s=speed, latency_s=rng.choice([0.0, 0.1]))
    settings = {
        "in_flight": rng.choice([None, [rng.randint(1, 4) for _ in range(count)]]),
        "first": rng.choice([None, layer(rng)]),
        "last": rng.choice([None, layer(rng)]),
    }
    return layers, devices, links, settings


def layer(rng):
    return LayerCost(
        seconds=rng.choice([1.0, 2.0, rng.uniform(0.1, 3)]),
        state_bytes=rng.randint(1, 9),
        kept_bytes=rng.randint(0, 3),
        out_bytes=rng.randint(1, 20),
    )


def along(links, order):
    """Links between neighbours."""
    return [links[a][b] for a, b in itertools.pairwise(order)]


def of_stages(bounds, layers, devices, links, *, in_flight, first, last):
    """(seconds, bytes) of each stage, by the words of `cut_layers`."""
    stages = len(devices)
    counts = range(stages, 0, -1) if in_flight is None else in_flight
    found = []
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        parts = list(layers[begin:end])
        parts += [first] if stage == 0 and first is not None else []
        parts += [last] if stage == stages - 1 and last is not None else []
        seconds = sum(part.seconds for part in parts) / devices[stage].speed
        for cut, link in ((begin, stage - 1), (end, stage)):
            if 0 < cut < len(layers):
                per_s = links[link].bytes_per_s
                sent = layers[cut - 1].out_bytes / per_s if per_s else 0.0
                seconds += links[link].latency_s + sent
        kept = sum(part.kept_bytes for part in parts) * counts[stage]
        found.append((seconds, kept + sum(part.state_bytes for part in parts)))
    return found


def all_bounds(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def best_by_trying(layers, devices, links, **settings):
    """(Seconds of the slowest stage, sum of squares) of the best cuts; None where none fit."""
    found = []
    for bounds in all_bounds(len(layers), len(devices)):
        stages = of_stages(bounds, layers, devices, links, **settings)
        room = [d.memory_bytes for d in devices]
        if all(r is None or size <= r for (_, size), r in zip(stages, room, strict=True)):
            seconds = [s for s, _ in stages]
            found.append((max(seconds), sum(s * s for s in seconds)))
    if not found:
        return None
    slowest = min(found)[0]
    return slowest, min(squares for s, squares in found if s <= slowest * (1 + 1e-12))


def seeded(block, size):
    """A generator of random numbers for each case of a block."""
    return [random.Random(seed) for seed in range(block * size, (block + 1) * size)]
