"""What a server's metrics say of drafts: how many were made and accepted, by position."""

from dataclasses import dataclass

NAME = 'parkade_{}_tokens_total{{position="{}"}}'


@dataclass(frozen=True)
class Drafts:
    """Totals by position: the first draft behind a sequence's newest token, the second, ..."""

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]

    @staticmethod
    def of(metrics: dict[str, float]) -> "Drafts":
        """From the flat table of a server's metrics."""
        count = 0
        while NAME.format("drafted", count + 1) in metrics:
            count += 1
        drafted, accepted = (
            tuple(metrics.get(NAME.format(kind, position + 1), 0.0) for position in range(count))
            for kind in ("drafted", "accepted")
        )
        return Drafts(drafted, accepted)

    def since(self, before: "Drafts") -> "Drafts":
        """What has been added after `before`."""

        def added(now: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value - (then[i] if i < len(then) else 0.0) for i, value in enumerate(now))

        return Drafts(added(self.drafted, before.drafted), added(self.accepted, before.accepted))

    def shares(self) -> str:
        """Of the drafts at each position, how many were accepted: `71% 52%`; `-` where there were none."""
        shares = [f"{accepted / drafted:.0%}" if drafted else "-" for drafted, accepted in zip(self.drafted, self.accepted)]
        return " ".join(shares) or "-"

    def tokens_per_step(self, tokens: float) -> float:
        """Of `tokens` generated meanwhile, how many a sequence got in one step."""
        steps = tokens - sum(self.accepted)
        return tokens / steps if steps > 0 else 1.0
