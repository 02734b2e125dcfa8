"""What a run does, as a pure function of its seed: the faults with their times, and what each client asks for."""

from random import Random

from msgspec import Struct, structs

from wire.failpoints import POINTS
from wire.messages import Sampling

PROCESSES = ("gpu_worker", "hostcache", "router", "router.openai")
# of 100 faults; the router's death ends streams, so it is rare
KINDS = {"kill": 22, "term": 6, "stop": 16, "failpoint": 34, "deny": 8, "corrupt": 14}
VICTIMS = {"gpu_worker": 45, "hostcache": 30, "router.openai": 13, "router": 12}
ZEROMQ_CLIENTS, HTTP_CLIENTS = 6, 3


class Fault(Struct, frozen=True):
    """`calm`: it waits until tokens have come since the one before it, and so do those behind it. `for_s`: how long a stop, a
    denial or a corruption lasts. `seed`: of what a corruption hits, and which of two workers."""

    at_s: float
    kind: str
    target: str = ""  # a process, or a failpoint
    action: str = ""  # of a failpoint
    for_s: float = 0.0
    seed: int = 0
    calm: bool = False


class Ask(Struct, frozen=True):
    """One request. `leave_at`, `park_at`: tokens after which the client cancels or goes away, or parks (0: never)."""

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    priority: int = 0
    leave_at: int = 0
    leave_how: str = ""  # cancel, vanish
    park_at: int = 0
    park_s: float = 0.0


def faults(seed: int, seconds: float) -> list[Fault]:
    """In order of time. The last half second is left alone, so that each can do its harm."""
    random = Random(f"faults {seed}")
    found: list[Fault] = []
    at_s = random.uniform(0.2, 0.8)
    while at_s < seconds - 0.5:
        calm = random.random() < 0.75
        found.append(structs.replace(_fault(random, round(at_s, 3)), calm=calm))
        at_s += random.uniform(0.0, 0.2) if random.random() < 0.25 else random.uniform(0.3, 3.0)
    return found


def _fault(random: Random, at_s: float) -> Fault:
    kind = _one_of(random, KINDS)
    victim = _one_of(random, VICTIMS)
    seed = random.getrandbits(32)
    short = random.choice((random.uniform(0.02, 0.3), random.uniform(0.3, 3.0)))
    match kind:
        case "kill" | "term":
            return Fault(at_s, kind, victim, seed=seed)
        case "stop":
            return Fault(at_s, kind, victim, for_s=round(short, 3), seed=seed)
        case "failpoint":
            name = random.choice([name for name, (file, _) in POINTS.items() if "router" not in file or random.random() < 0.3])
            action = random.choice(("kill", "kill", "stop", "raise"))
            return Fault(at_s, kind, name, action, round(short, 3))
        case "deny":
            return Fault(at_s, kind, "hostcache", for_s=round(random.uniform(0.2, 2.0), 3))
        case _:
            return Fault(at_s, kind, "hostcache", for_s=round(random.uniform(0.2, 2.0), 3), seed=seed)


def ask(seed: int, client: int, number: int, scale: float, few: bool) -> Ask:
    """What a client asks for as its request `number`. `scale`: of lengths. `few`: prompts that come again and again, for a model
    whose texts have to be heard before they are known."""
    random = Random(f"ask {seed} {client} {number}")
    which = random.randrange(6) if few else random.randrange(10**6)
    shape = Random(f"shape {which}") if few else random
    length = shape.randint(8, 300)
    prompt = [10 + (which * 7919 + position * 37) % 1900 for position in range(length)]
    if not few and random.random() < 0.2:
        prompt = [10 + position * 37 % 1900 for position in range(length)]  # shares its beginning with others
    sampling = Sampling(temperature=shape.choice((0.0, 0.9)), seed=which)
    max_tokens = max(4, int(shape.randint(20, 500) * scale))
    leave = random.random()
    park = random.random() < 0.15
    return Ask(
        id=f"{seed}-{client}-{number}",
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        priority=random.choice((0, 0, 0, 1)),
        leave_at=random.randint(1, max_tokens) if leave < 0.16 else 0,
        leave_how="cancel" if leave < 0.08 else "vanish",
        park_at=random.randint(1, max_tokens) if park else 0,
        park_s=round(random.uniform(0.1, 1.5), 2),
    )


def _one_of(random: Random, weights: dict[str, int]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]
