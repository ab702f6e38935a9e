"""Which actor runs where: pure arithmetic from the configuration to bundles and actors. Stdlib only.

A *bundle* is what the placement group reserves on one node. Colocated: learner rank i, critic rank i, engine i and reference
server i share bundle i, each with a fraction of its CPUs and of its device, because they work in different phases: the demand
is the maximum over the phases, not their sum. Separate: every engine, reference server, critic rank and learner rank has a
bundle of its own; an engine of t GPUs and a sharded reference server are one bundle, hence on one node. Graders use no device
and ride on the bundles in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from akl_dist.config.schema import Config

DEVICE_ROLES = ("rollout", "reference", "critic", "learner")
ROLES = ("rollout", "verify", "reference", "critic", "learner")

# Which roles compute at the same time. Graders work while the reference scores.
PHASES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "verify, reference": ("verify", "reference"),
    "critic": ("critic",),
    "learner": ("learner",),
    "weight_sync": ("learner", "rollout"),
}


@dataclass(frozen=True)
class Bundle:
    """What is reserved together on one node: CPUs and whole devices."""

    num_cpus: float
    num_gpus: int


@dataclass(frozen=True)
class Actor:
    """One process.

    Attributes:
        role: rollout | verify | reference | critic (only where one trains) | learner.
        index: number within the role; for a reference server of r ranks, server * r + rank.
        bundle: index into ``Layout.bundles``.
        num_cpus, num_gpus: its share of the bundle; shares on a bundle never add up to more than the bundle.
        num_threads: computing threads, set on purpose (Ray would derive them from num_cpus).
    """

    role: str
    index: int
    bundle: int
    num_cpus: float
    num_gpus: float
    num_threads: int


@dataclass(frozen=True)
class Layout:
    """Bundles in reservation order (largest first) and the actors on them."""

    bundles: tuple[Bundle, ...]
    actors: tuple[Actor, ...]
    strategy: str = "PACK"  # fewest nodes: ranks of one role talk to each other most

    def of(self, role: str) -> tuple[Actor, ...]:
        """Actors of one role, by index."""
        return tuple(actor for actor in self.actors if actor.role == role)

    def on(self, bundle: int) -> tuple[Actor, ...]:
        return tuple(actor for actor in self.actors if actor.bundle == bundle)

    @property
    def demand(self) -> dict[str, float]:
        """CPUs and GPUs reserved for the whole run."""
        return _sum(self.bundles)

    def demand_of(self, role: str) -> dict[str, float]:
        """CPUs and GPUs of the bundles that a role computes on (colocated roles count the same bundles)."""
        return _sum([self.bundles[index] for index in sorted({actor.bundle for actor in self.of(role)})])

    def phase_threads(self) -> dict[str, int]:
        """Computing threads per phase that has actors; a phase with more threads than CPUs is slow, not wrong."""
        threads = {phase: sum(actor.num_threads for role in roles for actor in self.of(role)) for phase, roles in PHASES.items()}
        return {phase: number for phase, number in threads.items() if number or phase != "critic"}


def layout(config: Config) -> Layout:
    """The layout of a validated configuration."""
    return _colocated(config) if config.cluster.layout == "colocated" else _separate(config)


def evaluation_layout(config: Config) -> Layout:
    """Engines, each on a bundle of its own, and graders: what an evaluation needs, whatever a training run would place."""
    width = config.rollout.tensor_parallel_size
    bundle = Bundle(config.cluster.cpus_per_actor * width, width if config.cluster.device == "cuda" else 0)
    number = config.rollout.num_engines
    return _seated(config, (bundle,) * number, [("rollout", index, index) for index in range(number)])


def _counts(config: Config) -> dict[str, int]:
    """Units of each role: engines (none when training from a replay), reference servers, critic ranks (as many as the learner's,
    where a critic trains), learner ranks."""
    engines = 0 if config.rollout.replay is not None else config.rollout.num_engines
    critics = config.learner.num_ranks if config.objective.advantage == "gae" else 0
    return {"rollout": engines, "reference": config.reference.num_workers, "critic": critics, "learner": config.learner.num_ranks}


def _threads(config: Config) -> dict[str, int]:
    return {"rollout": config.rollout.num_threads, "reference": config.reference.num_threads,
            "critic": config.learner.num_threads, "learner": config.learner.num_threads, "verify": 1}


def _colocated(config: Config) -> Layout:
    counts = _counts(config)
    gpus = 1 if config.cluster.device == "cuda" else 0
    bundles = tuple(Bundle(config.cluster.cpus_per_actor, gpus) for _ in range(max(counts.values())))
    seats = [(role, index, index) for role in DEVICE_ROLES for index in range(counts[role])]
    return _seated(config, bundles, seats)


def _separate(config: Config) -> Layout:
    counts, cuda = _counts(config), config.cluster.device == "cuda"
    sharded = config.reference.ranks_per_worker
    width = {"rollout": config.rollout.tensor_parallel_size, "reference": sharded, "critic": 1, "learner": 1}
    bundles: list[Bundle] = []
    seats: list[tuple[str, int, int]] = []
    for role in sorted(DEVICE_ROLES, key=lambda name: -width[name]):  # large bundles find their node first
        for unit in range(counts[role]):
            ranks = sharded if role == "reference" else 1
            seats += [(role, unit * ranks + rank, len(bundles)) for rank in range(ranks)]
            bundles.append(Bundle(config.cluster.cpus_per_actor * width[role], width[role] if cuda else 0))
    return _seated(config, tuple(bundles), seats)


def _seated(config: Config, bundles: tuple[Bundle, ...], seats: list[tuple[str, int, int]]) -> Layout:
    """Add the graders in turn and divide each bundle evenly among those on it."""
    seats = seats + [("verify", index, index % len(bundles)) for index in range(config.verify.num_workers)]
    on_bundle = [sum(1 for _, _, bundle in seats if bundle == index) for index in range(len(bundles))]
    on_device = [sum(1 for role, _, bundle in seats if bundle == index and role in DEVICE_ROLES) for index in range(len(bundles))]
    threads = _threads(config)
    actors = [
        Actor(
            role, index, bundle, num_cpus=_share(bundles[bundle].num_cpus, on_bundle[bundle]),
            num_gpus=_share(bundles[bundle].num_gpus, on_device[bundle]) if role in DEVICE_ROLES else 0.0,
            num_threads=threads[role],
        )
        for role, index, bundle in seats
    ]
    order = {role: number for number, role in enumerate(ROLES)}
    return Layout(bundles, tuple(sorted(actors, key=lambda actor: (order[actor.role], actor.index))))


def _share(amount: float, parts: int) -> float:
    """An even share, rounded down to Ray's resolution of 1/10,000, so that the shares fit."""
    return math.floor(amount / parts * 10_000) / 10_000


def _sum(bundles: Sequence[Bundle]) -> dict[str, float]:
    return {"CPU": round(sum(b.num_cpus for b in bundles), 4), "GPU": float(sum(b.num_gpus for b in bundles))}


def lacks(plan: Layout, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """What the cluster lacks for a layout, one sentence each, naming the role; empty when everything fits.

    Args:
        nodes: resources of each node, ``[{"CPU": 8, "GPU": 2}, ...]``; missing names count as 0.
    """
    found: list[str] = []
    for resource in ("GPU", "CPU"):
        total = sum(node.get(resource, 0.0) for node in nodes)
        needs = {role: plan.demand_of(role)[resource] for role in DEVICE_ROLES}
        short = [role for role in DEVICE_ROLES if needs[role] > total]
        found += [f"{role}: needs {_amount(needs[role], resource)}, the cluster has {_number(total)}" for role in short]
        demand = plan.demand[resource]
        if not short and demand > total:
            parts = ", ".join(f"{role} {_number(needs[role])}" for role in DEVICE_ROLES if role != "critic" or plan.of(role))
            found.append(f"all roles together: need {_amount(demand, resource)} ({parts}), the cluster has {_number(total)}")
    return found or _homeless(plan, nodes)


def _homeless(plan: Layout, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Bundles that find no node although the totals suffice: first fit, largest bundle first."""
    free = [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in nodes]
    left: dict[tuple[str, float, int], int] = {}
    order = sorted(range(len(plan.bundles)), key=lambda i: (-plan.bundles[i].num_gpus, -plan.bundles[i].num_cpus, i))
    for index in order:
        bundle = plan.bundles[index]
        home = next((f for f in free if f["GPU"] >= bundle.num_gpus and f["CPU"] + 1e-9 >= bundle.num_cpus), None)
        if home is not None:
            home["GPU"] -= bundle.num_gpus
            home["CPU"] -= bundle.num_cpus
            continue
        roles = sorted({actor.role for actor in plan.on(index)} & set(DEVICE_ROLES), key=ROLES.index)
        key = (" + ".join(roles), bundle.num_cpus, bundle.num_gpus)
        left[key] = left.get(key, 0) + 1
    largest = {r: max((node.get(r, 0.0) for node in nodes), default=0.0) for r in ("CPU", "GPU")}
    return [
        f"{roles}: {count} bundle{'s' if count > 1 else ''} of {_amount(gpus, 'GPU')} and {_amount(cpus, 'CPU')} on one node find "
        f"no place; the largest node has {_amount(largest['GPU'], 'GPU')} and {_amount(largest['CPU'], 'CPU')}"
        for (roles, cpus, gpus), count in left.items()
    ]


def _number(amount: float) -> str:
    return f"{amount:g}"


def _amount(amount: float, resource: str) -> str:
    return f"{_number(amount)} {resource}{'' if amount == 1 else 's'}"
