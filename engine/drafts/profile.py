"""Profile: how well drafts were guessed for one tenant's adapters and grammar. No torch here."""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from engine.memory.prefix_cache import AdapterKey
from engine.sequence import Sequence

_MAX_PROFILES = 512
_MAX_CHOICES = 256
#: Weight of one draft's outcome in its kind's rate; the first ones weigh more.
_SLOWEST = 0.05
#: One of this number of drafts that do not seem to pay is tried all the same.
_PROBE_EVERY = 32


class Source(enum.StrEnum):
    """The source of a draft.

    FORCED  the grammar allows no other text
    CHOICE  the grammar allows a few tokens; the same tenant's adapter and grammar last chose this
    LOOKUP  it followed the same tokens in the prompt or the answer
    MEMORY  an earlier answer of the same tenant's adapters does
    HEADS   the adapter's draft heads guess it
    """

    FORCED = "forced"
    CHOICE = "choice"
    LOOKUP = "lookup"
    MEMORY = "memory"
    HEADS = "heads"

    __hash__ = str.__hash__  # an enum's own is Python, and kinds are looked up for every draft


#: Names of sources: an enum's `value` is two calls of Python.
NAMES = {source: str(source.value) for source in Source}


class Kind(NamedTuple):
    """Drafts that are about equally likely to be right.

    agreeing  for LOOKUP and MEMORY, how many tokens before it agree; for HEADS, which head
    """

    source: Source
    agreeing: int = 0


#: Assumed before there is experience.
_PRIORS = {Source.FORCED: 1.0, Source.CHOICE: 0.7}
_LOOKUP_PRIORS = (0.0, 0.25, 0.5, 0.7)
_HEAD_PRIORS = (0.7, 0.6, 0.5, 0.5)

#: A place in a grammar: the token before, and the few tokens that are allowed.
Place = tuple[int, tuple[int, ...]]


#: Number of the latest choices at a place that count.
_MAX_TRIALS = 20.0


@dataclass(slots=True)
class _Choices:
    """The choices at a place: the latest token, and how often it equalled the one before."""

    token_id: int
    num_same: float = 0.0
    num_trials: float = 0.0

    @property
    def chance(self) -> float:
        """The chance that the same one is chosen, as if two times had shown the prior."""
        return (self.num_same + 2.0 * _PRIORS[Source.CHOICE]) / (self.num_trials + 2.0)

    def add(self, token_id: int) -> None:
        """Note that a further token was chosen."""
        self.num_same += token_id == self.token_id
        self.num_trials += 1.0
        if self.num_trials > _MAX_TRIALS:
            self.num_same *= _MAX_TRIALS / self.num_trials
            self.num_trials = _MAX_TRIALS
        self.token_id = token_id


class Profile:
    """Rates of right drafts by kind, and what was last chosen where a grammar allows few tokens.

    gain  right drafts of a sequence in a step, lately; 1 is assumed before there is experience
    """

    def __init__(self) -> None:
        self.gain, self._num_gains = 1.0, 0
        self._rates: dict[Kind, float] = {}
        self._counts: dict[Kind, int] = {}
        self._unpaid: dict[Kind, int] = {}
        self._choices: OrderedDict[Place | tuple[int, ...], _Choices] = OrderedDict()
        self._unforced: set[tuple[Place, int]] = set()

    def rate(self, kind: Kind) -> float:
        """Return the chance that a draft of this kind is right, if those before it are."""
        rate = self._rates.get(kind)
        if rate is None:
            priors = _HEAD_PRIORS if kind.source is Source.HEADS else _LOOKUP_PRIORS
            rate = _PRIORS.get(kind.source, priors[kind.agreeing])
        return rate

    def probes(self, kind: Kind) -> bool:
        """Return whether a draft that does not seem to pay is tried this time."""
        self._unpaid[kind] = count = self._unpaid.get(kind, 0) + 1
        return count % _PROBE_EVERY == 0

    def note(self, kind: Kind, is_right: bool) -> None:
        """Note the outcome of a draft that was verified."""
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        rate = self.rate(kind)
        self._rates[kind] = rate + (is_right - rate) * max(_SLOWEST, 1.0 / (1 + count))

    def note_gain(self, num_right: int) -> None:
        """Note how many drafts of a sequence were right in a step."""
        self._num_gains += 1
        self.gain += (num_right - self.gain) * max(_SLOWEST, 1.0 / (1 + self._num_gains))

    def choice(self, place: Place) -> tuple[int, float] | None:
        """Return the token that was last chosen at the place, or else among the same tokens.

        With the chance that it is chosen again: so often the same one was chosen twice there.
        """
        found = self._choices.get(place) or self._choices.get(place[1])
        return None if found is None else (found.token_id, found.chance)

    def note_choice(self, place: Place, token_id: int) -> None:
        keys: tuple[Place | tuple[int, ...], ...] = (place, place[1])
        for key in keys:
            known = self._choices.get(key)
            if known is not None:
                known.add(token_id)
                self._choices.move_to_end(key)
                continue
            self._choices[key] = _Choices(token_id)
            if len(self._choices) > _MAX_CHOICES:
                self._choices.popitem(last=False)

    def expects_forced(self, place: Place, token_id: int) -> bool:
        """Return whether text may be forced behind a token that was chosen at the place."""
        return (place, token_id) not in self._unforced

    def note_unforced(self, place: Place, token_id: int) -> None:
        """Note that no text was forced there."""
        if len(self._unforced) >= _MAX_CHOICES:
            self._unforced.clear()
        self._unforced.add((place, token_id))


#: Tenant, adapters, their registrations, and the digest of the grammar.
_Key = tuple[str, AdapterKey, tuple[int, ...], bytes | None]


class Profiles:
    """The profiles used last, one for each tenant, adapters and grammar."""

    def __init__(self) -> None:
        self._profiles: OrderedDict[_Key, Profile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._profiles)

    def of(self, sequence: Sequence) -> Profile:
        request = sequence.request
        digest = None
        if request.grammar is not None:
            digest = hashlib.sha256(repr(request.grammar).encode()).digest()
        key = (request.tenant_id, sequence.adapter_key, sequence.versions, digest)
        profile = self._profiles.get(key)
        if profile is None:
            profile = self._profiles[key] = Profile()
            if len(self._profiles) > _MAX_PROFILES:
                self._profiles.popitem(last=False)
        self._profiles.move_to_end(key)
        return profile

    def forget_adapter(self, digest: str) -> None:
        """Drop what is known of an adapter's answers."""
        for key in list(self._profiles):
            if any(digest == part for part, _ in key[1]):
                del self._profiles[key]
