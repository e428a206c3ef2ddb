"""A decoder with a cache of keys and values, whose prompts are of different lengths: requests together, or alone.

One layer of attention with two heads and one of 2 * width. The cache has room for the longest sequence, and a mask of
the places that are filled, or it grows with each step. By hand, NumPy steps all live rows of such caches with room.
Sampled, each step draws a word at a temperature, by the seed of the request; by hand, all rows draw from one stream.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.pooled_loop import ALONE, BY_HAND, TIME, trial_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Request = tuple[Array, int, int]

GROWING = "caches that grow, in a pool"
GREEDY_ALONE = "the most likely words, a run a request"
WORDS, HEADS = 97, 2
TEMPERATURE = 0.8
DRAW = 7
"""The seed of the op that samples."""


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    width: int = 64,
    room: int = 256,
    clients: tuple[int, ...] = (1, 32),
    requests: int = 96,
    prompts: tuple[int, int] = (5, 200),
    lengths: tuple[int, int] = (10, 60),
) -> list[Result]:
    """Milliseconds of all requests, with a pool, and without."""
    random = np.random.default_rng(1)
    sizes = [random.integers(low, high + 1, requests) for low, high in (prompts, lengths)]
    asked = [(random.integers(0, WORDS, m), int(n), k) for k, (m, n) in enumerate(zip(*sizes, strict=True))]
    decoder = Decoder.of(width, room)
    with af.Graph() as graph:
        prompt, n, seed = af.placeholder("int64", (None,)), af.placeholder("int64", ()), af.placeholder("int64", ())
        alone, pooled = (decoder.loop(prompt, n, pool) for pool in (None, af.Pool(max(clients))))
        growing = decoder.loop(prompt, n, af.Pool(max(clients)), grows=True)
        alone_sampled, sampled = (decoder.loop(prompt, n, pool, seed=seed) for pool in (None, af.Pool(max(clients))))
    found = []
    async with af.Session(graph) as session:
        for each in clients:
            greedy, drawn = (
                {
                    name: trial_of(session.prepare(fetch, [prompt, n, seed]), asked, each)
                    for name, fetch in chosen.items()
                }
                for chosen in (
                    {ASYNCFLOW: pooled, ALONE: alone, GROWING: growing},
                    {ASYNCFLOW: sampled, ALONE: alone_sampled},
                )
            )
            drawn[GREEDY_ALONE] = _unchecked(greedy[ALONE])
            greedy[BY_HAND] = _by_hand_trial(decoder, asked, each)
            drawn[BY_HAND] = _unchecked(_by_hand_trial(decoder, asked, each, np.random.default_rng(each)))
            case = f"{width} wide, {requests} prompts of {prompts[0]} to {prompts[1]}, {each} at a time"
            for what, trials in ((case, greedy), (f"{case}, sampled", drawn)):
                found += await compare("pooled_decoder", what, trials, repeats=repeats, tolerance=1e-4)
    return found


class Decoder(NamedTuple):
    """The room of a cache, and weights."""

    room: int
    words: Array
    ask: Array
    key: Array
    value: Array
    mix: Array
    wide: Array
    narrow: Array

    @staticmethod
    def of(width: int, room: int) -> Decoder:
        """A random one."""
        random, w = np.random.default_rng(0), width
        shapes = (WORDS, w), *[(w, w)] * 4, (w, 2 * w), (2 * w, w)
        weights = ((random.normal(size=s) / s[0] ** 0.5).astype(np.float32) for s in shapes)
        return Decoder(room, *weights)

    def loop(
        self,
        prompt: af.Tensor,
        n: af.Tensor,
        pool: af.Pool | None,
        *,
        grows: bool = False,
        seed: af.Tensor | None = None,
    ) -> af.Tensor:
        """Return the scores of all words at the last of `n` steps; with a seed, words are sampled."""
        width = self.ask.shape[0]
        last, x = af.shape(prompt)[0] - 1, af.take(self.words, prompt, axis=0)[:-1]
        room = None if grows else self.room
        places = np.arange(self.room)

        def cache(rows: af.Tensor) -> af.Tensor:
            empty = af.zeros((self.room, width), dtype="float32")
            return rows if grows else af.index_update(empty, slice(None, last), rows)

        def written(cache: af.Tensor, at: af.Tensor, row: af.Tensor) -> af.Tensor:
            return af.concat([cache, row[None]], axis=0) if grows else af.index_update(cache, at, row)

        def of_heads(cache: af.Tensor) -> af.Tensor:
            return af.permute_dims(af.reshape(cache, (-1 if grows else self.room, HEADS, width // HEADS)), (1, 0, 2))

        def step(at: af.Tensor, _: af.Tensor, word: af.Tensor, keys: af.Tensor, values: af.Tensor) -> list[af.Tensor]:
            x = af.take(self.words, word, axis=0)
            keys, values = written(keys, at, x @ self.key), written(values, at, x @ self.value)
            asked = af.reshape(x @ self.ask, (HEADS, width // HEADS, 1))
            scores = (of_heads(keys) @ asked)[:, :, 0]
            shares = af.softmax(scores if grows else af.where(places <= at, scores, -np.inf))
            x = x + af.reshape(shares[:, None] @ of_heads(values), (width,)) @ self.mix
            found = (x + af.relu(x @ self.wide) @ self.narrow) @ self.words.T
            if seed is None:
                word = af.argmax(found)
            else:
                word = af.random.categorical(found / TEMPERATURE, seed=(seed, DRAW))
            return [at + 1, found, word, keys, values]

        start = (last, af.zeros((WORDS,), dtype="float32"), prompt[-1], cache(x @ self.key), cache(x @ self.value))
        shapes = ((), (WORDS,), (), (room, width), (room, width))
        found: af.Tensor = af.while_loop(lambda at, *_: at < last + n, step, start, shape_invariants=shapes, pool=pool)[
            1
        ]
        return found

    def by_hand(self, requests: list[Request], capacity: int, random: np.random.Generator | None = None) -> Array:
        """Compute all requests by hand: live rows side by side, the last one in the place of a row that ends.

        Args:
            requests: of all clients.
            capacity: rows of the slabs.
            random: samples words.
        """
        width = self.ask.shape[0]
        caches = np.zeros((2, capacity, self.room, width), np.float32)
        at, word, end = np.zeros((3, capacity), np.int64)
        answers, owners = np.empty((len(requests), WORDS), np.float32), list[int]()
        waiting, places = list(range(len(requests)))[::-1], np.arange(self.room)
        while waiting or owners:
            while waiting and len(owners) < capacity:
                row, number = len(owners), waiting.pop()
                prompt, n, _ = requests[number]
                for cache, weights in zip(caches, (self.key, self.value), strict=True):
                    cache[row, len(prompt) - 1 :] = 0
                    cache[row, : len(prompt) - 1] = self.words[prompt[:-1]] @ weights
                at[row], word[row], end[row] = len(prompt) - 1, prompt[-1], len(prompt) - 1 + n
                owners.append(number)
            live = len(owners)
            x = self.words[word[:live]]
            for cache, weights in zip(caches, (self.key, self.value), strict=True):
                cache[range(live), at[:live]] = x @ weights
            keys, values = caches[:, :live].reshape(2, live, self.room, HEADS, -1).swapaxes(2, 3)
            scores = (keys @ (x @ self.ask).reshape(live, HEADS, -1, 1))[..., 0]
            shares = np.exp(np.where(places <= at[:live, None, None], scores, -np.inf))
            shares /= shares.sum(axis=-1, keepdims=True)
            x = x + (shares[:, :, None] @ values).reshape(live, width) @ self.mix
            found = (x + np.maximum(x @ self.wide, 0) @ self.narrow) @ self.words.T
            logits = found if random is None else found / TEMPERATURE + random.gumbel(size=found.shape)
            word[:live] = logits.argmax(axis=-1)
            at[:live] += 1
            for row in reversed(np.flatnonzero(at[:live] >= end[:live])):
                answers[owners[row]] = found[row]
                last, number = len(owners) - 1, owners.pop()
                if row < last:
                    owners[row], found[row] = number, found[last]
                    for slab in (*caches, at, word, end):
                        slab[row] = slab[last]
        return answers


def _unchecked(trial: Trial) -> Trial:
    """A trial of other words."""

    async def run() -> Sample:
        return Sample((await trial()).figures)

    return run


def _by_hand_trial(
    decoder: Decoder, requests: list[Request], capacity: int, random: np.random.Generator | None = None
) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        answers = decoder.by_hand(requests, capacity, random)
        return Sample({TIME: (perf_counter() - started) * 1e3}, answers)

    return trial
